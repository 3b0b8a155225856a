//! What the model is offered: the runtime's own tools, which are those of the loop's mode, such as `yield`, and `memory`; and
//! the tools of the sources.
//!
//! Owns when a change of the offer reaches the prompts, and what is offered of what the sources list. Journals nothing; what is
//! withheld is decided in `definitions`.

use std::collections::BTreeSet;

use crate::machine::Engine;
use crate::memory;
use crate::message::ToolDefinition;
use crate::modes::LoopMode;
use crate::settings::EngineSettings;
use crate::tool::{DeclaredDefinition, ToolSpec};
use crate::tools::admission::{DenialReason, DeniedCall, Toolbox};

/// The runtime's own tools, which come before all others in a prompt. `events`: those that can wake the loop, if known.
pub fn own_tools(mode: &dyn LoopMode, settings: &EngineSettings, events: Option<&[String]>) -> Vec<ToolDefinition> {
    let mut tools = mode.tools(settings, events);
    tools.extend(settings.memory_bytes.map(memory::tool::definition));
    tools
}

impl Engine {
    pub(crate) fn own_tools(&self, events: Option<&[String]>) -> Vec<ToolDefinition> {
        own_tools(self.mode(), &self.settings, events)
    }
}

/// The tools of the prompts, and those of the next turn's.
#[derive(Clone, Debug)]
pub struct ToolOffer {
    current: Toolbox,
    /// The tools from the next turn on.
    next: Option<Toolbox>,
    /// What the sources list now.
    listed: ToolList,
    /// Names of the listed tools that are not offered, since a person has not approved their definitions.
    withheld: BTreeSet<String>,
    /// Events that can wake the loop; `None`: not known.
    wake_events: Option<Vec<String>>,
}

/// All tools that the sources have, offered or not.
#[derive(Clone, Debug, Default)]
pub struct ToolList {
    pub tools: Vec<ToolSpec>,
    /// Servers that have not answered yet.
    pub silent: Vec<String>,
}

impl ToolOffer {
    /// Only the runtime's own tools, since no source has declared its tools yet.
    pub fn new(own_tools: Vec<ToolDefinition>) -> Self {
        Self {
            current: Toolbox::before_any_offer(own_tools),
            next: None,
            listed: ToolList::default(),
            withheld: BTreeSet::new(),
            wake_events: None,
        }
    }

    /// The tools that the model may call now.
    pub fn toolbox(&self) -> &Toolbox {
        &self.current
    }

    /// What the sources list now.
    pub fn listed(&self) -> &ToolList {
        &self.listed
    }

    /// Names of the listed tools that are not offered.
    pub fn withheld(&self) -> &BTreeSet<String> {
        &self.withheld
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
        listed: ToolList,
        withheld: BTreeSet<String>,
        own_tools: Vec<ToolDefinition>,
        in_turn: bool,
    ) {
        let answers = self
            .current
            .silent()
            .iter()
            .any(|server| !listed.silent.contains(server));
        let is_first = !self.current.is_offered();
        self.listed = listed;
        self.offer(withheld, own_tools, !in_turn || answers || is_first);
    }

    /// Other tools of the list are withheld.
    pub fn withheld_changed(&mut self, withheld: BTreeSet<String>, own_tools: Vec<ToolDefinition>, in_turn: bool) {
        if withheld != self.withheld {
            self.offer(withheld, own_tools, !in_turn);
        }
    }

    fn offer(&mut self, withheld: BTreeSet<String>, own_tools: Vec<ToolDefinition>, at_once: bool) {
        let offered = self.listed.tools.iter().filter(|spec| !withheld.contains(&spec.name));
        let silent = self.listed.silent.clone();
        self.next = Some(Toolbox::new(offered.cloned().collect(), silent, own_tools));
        self.withheld = withheld;
        if at_once {
            self.turn_begins();
        }
    }

    /// The events that can wake the loop; the runtime's own tools list them from the next turn on.
    pub fn wake_events_changed(&mut self, names: Vec<String>, own_tools: Vec<ToolDefinition>, in_turn: bool) {
        self.wake_events = Some(names);
        let newest = self.next.take().unwrap_or_else(|| self.current.clone());
        self.next = Some(newest.with_own_tools(own_tools));
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

    /// Whether a source has a tool of this name, offered or not.
    pub fn knows(&self, name: &str) -> bool {
        self.current.knows(name) || self.withheld.contains(name)
    }

    /// Why a call is not run because of the definition of its tool, if so. The list of tools stays the same within a turn,
    /// but what the model was shown of a tool in it may no longer be what the tool is.
    pub fn changed(&self, name: &str) -> Option<DeniedCall> {
        if self.withheld.contains(name) {
            return Some(DeniedCall::not_run(
                DenialReason::DefinitionChanged,
                "the server of this tool has changed its definition, or has added it, and no person has approved that",
                "continue without it; it is offered once a person has approved its definition",
            ));
        }
        let shown = self.current.definition(name)?;
        let listed = self.listed.tools.iter().find(|spec| spec.name == name)?;
        let is_other = |definition: &&DeclaredDefinition| definition.holds_changes && definition.hash != shown;
        listed.definition.as_ref().filter(is_other)?;
        Some(DeniedCall::not_run(
            DenialReason::DefinitionChanged,
            "the definition of this tool has changed since you were shown it",
            "continue without it in this turn; the next turn offers it with its new definition",
        ))
    }
}
