//! What the model is offered: the tools of the loop's mode, such as `yield`, and those of the sources.
//!
//! Owns when a change of the offer reaches the prompts. Journals nothing.

use crate::message::ToolDefinition;
use crate::tool::ToolSpec;
use crate::tools::admission::Toolbox;

/// The tools of the prompts, and those of the next turn's.
#[derive(Clone, Debug)]
pub struct ToolOffer {
    current: Toolbox,
    /// The tools from the next turn on.
    next: Option<Toolbox>,
    /// Events that can wake the loop; `None`: not known.
    wake_events: Option<Vec<String>>,
}

impl ToolOffer {
    /// Only the tools of the mode, since no source has declared its tools yet.
    pub fn new(mode_tools: Vec<ToolDefinition>) -> Self {
        Self {
            current: Toolbox::before_any_offer(mode_tools),
            next: None,
            wake_events: None,
        }
    }

    /// The tools that the model may call now.
    pub fn toolbox(&self) -> &Toolbox {
        &self.current
    }

    /// Events that can wake the loop; `None`: not known.
    pub fn wake_events(&self) -> Option<&[String]> {
        self.wake_events.as_deref()
    }

    /// The tools of the sources have changed. Never journalled.
    ///
    /// Within a turn the list of tools stays the same, because it comes first in each prompt: any change misses the
    /// provider's prompt cache. Only a server that answers for the first time joins at once, since its tools were
    /// missing.
    pub fn tools_changed(
        &mut self,
        tools: Vec<ToolSpec>,
        silent: Vec<String>,
        mode_tools: Vec<ToolDefinition>,
        in_turn: bool,
    ) {
        let answers = self.current.silent().iter().any(|server| !silent.contains(server));
        let is_first = !self.current.is_offered();
        self.next = Some(Toolbox::new(tools, silent, mode_tools));
        if !in_turn || answers || is_first {
            self.turn_begins();
        }
    }

    /// The events that can wake the loop; the mode's tools list them from the next turn on.
    pub fn wake_events_changed(&mut self, names: Vec<String>, mode_tools: Vec<ToolDefinition>, in_turn: bool) {
        self.wake_events = Some(names);
        let newest = self.next.take().unwrap_or_else(|| self.current.clone());
        self.next = Some(newest.with_mode_tools(mode_tools));
        if !in_turn {
            self.turn_begins();
        }
    }

    /// A turn begins: its prompts offer the newest tools.
    pub fn turn_begins(&mut self) {
        if let Some(toolbox) = self.next.take() {
            self.current = toolbox;
        }
    }
}
