//! What the model is offered: the tools of the loop's mode, such as `yield`, and those of the sources.
//!
//! Owns when a change of the offer reaches the prompts. Journals nothing.

use crate::machine::Engine;
use crate::tool::ToolSpec;
use crate::tools::admission::Toolbox;

impl Engine {
    /// The tools of the sources have changed. Never journalled.
    ///
    /// Within a turn the list of tools stays the same, because it comes first in each prompt: any change misses the
    /// provider's prompt cache. Only a server that answers for the first time joins at once, since its tools were
    /// missing.
    pub(crate) fn tools_changed(&mut self, tools: Vec<ToolSpec>, silent: Vec<String>) {
        let mode_tools = self.mode().tools(&self.settings, self.wake_events.as_deref());
        let answers = self.toolbox.silent().iter().any(|server| !silent.contains(server));
        let is_first = !self.toolbox.is_offered();
        self.next_toolbox = Some(Toolbox::new(tools, silent, mode_tools));
        if self.state.turn.is_none() || answers || is_first {
            self.take_tools();
        }
    }

    /// The events that can wake the loop; the mode's tools list them from the next turn on.
    pub(crate) fn wake_events_changed(&mut self, names: Vec<String>) {
        let mode_tools = self.mode().tools(&self.settings, Some(&names));
        self.wake_events = Some(names);
        let newest = self.next_toolbox.take().unwrap_or_else(|| self.toolbox.clone());
        self.next_toolbox = Some(newest.with_mode_tools(mode_tools));
        if self.state.turn.is_none() {
            self.take_tools();
        }
    }

    /// A turn begins: its prompts offer the newest tools.
    pub(crate) fn take_tools(&mut self) {
        if let Some(toolbox) = self.next_toolbox.take() {
            self.toolbox = toolbox;
        }
    }
}
