//! What the model is offered: the tools of the sources, and `yield` with the events that can wake the loop.
//!
//! Owns when a change of the offer reaches the prompts. Journals nothing.

use super::machine::Engine;
use super::tool::ToolSpec;
use super::tool_admission::Toolbox;
use super::yield_tool;

impl Engine {
    /// What the sources offer now. Never journalled.
    ///
    /// Within a turn the list of tools stays as it is, because it stands first in each prompt: a change is a full miss of
    /// the provider's cache. Only a server that answers for the first time joins at once, since its tools were missing.
    pub(super) fn tools_changed(&mut self, tools: Vec<ToolSpec>, silent: Vec<String>) {
        let yields = yield_tool::tool(&self.settings.rate_limits, self.wake_events.as_deref());
        let answers = self.toolbox.silent().iter().any(|server| !silent.contains(server));
        let is_first = !self.toolbox.is_offered();
        self.next_toolbox = Some(Toolbox::new(tools, silent, yields));
        if self.state.turn.is_none() || answers || is_first {
            self.take_tools();
        }
    }

    /// The events that can wake the loop; `yield` lists them from the next turn on.
    pub(super) fn wake_events_changed(&mut self, names: Vec<String>) {
        let yields = yield_tool::tool(&self.settings.rate_limits, Some(&names));
        self.wake_events = Some(names);
        let newest = self.next_toolbox.take().unwrap_or_else(|| self.toolbox.clone());
        self.next_toolbox = Some(newest.with_yield(yields));
        if self.state.turn.is_none() {
            self.take_tools();
        }
    }

    /// A turn begins: its prompts offer what the sources offer now.
    pub(super) fn take_tools(&mut self) {
        if let Some(toolbox) = self.next_toolbox.take() {
            self.toolbox = toolbox;
        }
    }
}
