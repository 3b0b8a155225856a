//! Pinned definitions: what the servers declared their tools to be when that was accepted.
//!
//! A definition is part of each prompt, so a server that changes it later, after people have come to trust the tool, instructs
//! the model. Owns the pins, and the gates with which a person accepts other definitions. Decides which tools are withheld;
//! what is offered of the rest, and when, is up to `tools::offer`.
//!
//! What is withheld follows from the pins and the list alone, and holds as soon as the list arrives, so that no prompt has a
//! definition that must not be in it. Pins and gates change with the next input, where that can be journalled. The first
//! definitions of a server are accepted, and so are those of a server whose address or credentials a person has edited. The pin
//! of a tool outlives the tool. A gate does not pause the loop and does not expire.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::RecordKind;
use crate::approvals::{EngineGateAnswer, GateTerms, OpenGate};
use crate::definition_parts::DefinitionParts;
use crate::effects::{EffectBuffer, journal_line};
use crate::machine::Engine;
use crate::tool::{DeclaredDefinition, ToolSpec};
use crate::tools::offer::ToolList;
use agentloop_api::status::{GateKind, MAX_GATES};
use agentloop_support::hash::sha256_hex;

/// Maximum number of pins of a server. Beyond it, those of tools that it no longer lists are dropped, which makes these
/// tools new.
const MAX_PINS: usize = 256;
/// Maximum number of servers with pins. Beyond it, those without listed tools are dropped: the spec no longer names them.
const MAX_SERVERS: usize = 32;
/// Maximum number of parameters of a server's tools of which hashes are kept. Beyond it, a change of a tool is named
/// without its parts.
const MAX_PARAMETERS: usize = 512;
/// Maximum number of tools that a record names of each kind.
const MAX_NAMES: usize = 10;

/// Hashes of definitions by the names of their tools.
type Definitions = BTreeMap<String, String>;

/// The pinned definitions of all servers, by their names.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(transparent)]
pub struct DefinitionPins {
    servers: BTreeMap<String, PinnedServer>,
}

/// The pinned definitions of one server.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
struct PinnedServer {
    /// [`DeclaredDefinition::server`] when they were pinned.
    server: String,
    tools: Definitions,
    /// The parts of the pinned definitions, as far as they are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    parts: BTreeMap<String, DefinitionParts>,
    /// The open gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gate: Option<DefinitionGate>,
    /// Hash of the definitions that a person has denied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    denied: Option<String>,
    /// How many gates were opened, part of their ids.
    #[serde(default)]
    gates: u64,
}

/// A gate for other definitions of a server.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct DefinitionGate {
    /// Never reused, even by another pod of the Agent.
    id: String,
    opened_at: Timestamp,
    /// What an approval pins.
    tools: Definitions,
}

/// How the definitions that a server lists now differ from its pins.
#[derive(Default)]
struct ListedServer {
    server: String,
    /// Whether they are accepted as they are.
    is_first: bool,
    /// Those that differ, and need no approval.
    accepted: Definitions,
    /// Those that differ, and need one.
    held: Definitions,
}

impl DefinitionPins {
    /// Names of the listed tools that must not be offered.
    pub fn withheld(&self, listed: &[ToolSpec]) -> BTreeSet<String> {
        let servers = self.compare(listed).into_values();
        servers.flat_map(|listed| listed.held.into_keys()).collect()
    }

    /// What the servers in this list have, by their names.
    fn compare(&self, listed: &[ToolSpec]) -> BTreeMap<String, ListedServer> {
        let mut servers: BTreeMap<String, ListedServer> = BTreeMap::new();
        for (spec, declared) in listed.iter().filter_map(|spec| Some((spec, spec.definition.as_ref()?))) {
            let server = spec.server();
            let pinned = self.servers.get(server).filter(|pins| pins.server == declared.server);
            let found = servers.entry(server.to_owned()).or_insert_with(|| ListedServer {
                server: declared.server.clone(),
                is_first: pinned.is_none(),
                ..ListedServer::default()
            });
            let Some(is_held) = differs(declared, pinned.and_then(|pins| pins.tools.get(&spec.name))) else {
                continue;
            };
            let tools = if is_held && !found.is_first {
                &mut found.held
            } else {
                &mut found.accepted
            };
            tools.insert(spec.name.clone(), declared.hash.clone());
        }
        servers
    }

    /// The open gates, by server.
    fn gates(&self) -> impl Iterator<Item = (&String, &DefinitionGate)> {
        let servers = self.servers.iter();
        servers.filter_map(|(name, pins)| Some((name, pins.gate.as_ref()?)))
    }

    /// How many gates are open.
    pub fn open_gates(&self) -> usize {
        self.gates().count()
    }

    /// Keeps the parts of the definitions in this list that are pinned.
    fn keep_parts(&mut self, listed: &[ToolSpec]) {
        for (spec, declared) in listed.iter().filter_map(|spec| Some((spec, spec.definition.as_ref()?))) {
            let pins = self.servers.get_mut(spec.server());
            if let Some(pins) = pins.filter(|pins| pins.tools.get(&spec.name) == Some(&declared.hash)) {
                pins.keep_parts(&spec.name, &declared.parts);
            }
        }
    }

    /// Drops the pins of servers that the spec no longer names, if there are many.
    fn drop_servers(&mut self, listed: &ToolList) {
        if self.servers.len() > MAX_SERVERS {
            let names: BTreeSet<&str> = listed.tools.iter().map(ToolSpec::server).collect();
            let is_named = |name: &String| names.contains(&**name) || listed.silent.contains(name);
            self.servers.retain(|name, _| is_named(name));
        }
    }
}

impl PinnedServer {
    fn pin(&mut self, tools: Definitions, listed: &[ToolSpec]) {
        // Those of the definitions before.
        self.parts.retain(|name, _| !tools.contains_key(name));
        self.tools.extend(tools);
        self.denied = None;
        if self.tools.len() > MAX_PINS {
            let listed: BTreeSet<&str> = listed.iter().map(|spec| &*spec.name).collect();
            self.tools.retain(|name, _| listed.contains(&**name));
            self.parts.retain(|name, _| listed.contains(&**name));
        }
    }

    /// Keeps the parts of a pinned definition, if there is room for them.
    fn keep_parts(&mut self, name: &str, parts: &DefinitionParts) {
        if self.parts.contains_key(name) {
            return;
        }
        let kept: usize = self.parts.values().map(DefinitionParts::parameters).sum();
        if kept + parts.parameters() <= MAX_PARAMETERS {
            self.parts.insert(name.to_owned(), parts.clone());
        }
    }

    /// The changed and the new ones of these listed tools, for a record.
    fn names(&self, tools: &Definitions, listed: &[ToolSpec]) -> String {
        let (changed, new): (Vec<&String>, Vec<&String>) =
            tools.keys().partition(|name| self.tools.contains_key(*name));
        let changed = changed
            .into_iter()
            .map(|name| self.changed_name(name, listed))
            .collect();
        let new = new.into_iter().cloned().collect::<Vec<String>>();
        let kinds: [(&str, Vec<String>); 2] = [("changed", changed), ("new", new)];
        let kinds = kinds.into_iter();
        let kinds = kinds.filter(|(_, names)| !names.is_empty());
        let kinds: Vec<String> = kinds
            .map(|(kind, names)| format!("{kind} {}", first_names(&names)))
            .collect();
        kinds.join("; ")
    }

    /// A changed tool, with the parts of its definition that differ from what is pinned.
    fn changed_name(&self, name: &str, listed: &[ToolSpec]) -> String {
        let declared = listed.iter().find(|spec| spec.name == name);
        let declared = declared.and_then(|spec| spec.definition.as_ref());
        let parts = self.parts.get(name).zip(declared);
        match parts
            .map(|(old, new)| old.difference(&new.parts))
            .filter(|parts| !parts.is_empty())
        {
            Some(parts) => format!("{name} ({parts})"),
            None => name.to_owned(),
        }
    }
}

impl DefinitionGate {
    fn hash(&self) -> String {
        hash(&self.tools)
    }
}

impl Engine {
    /// The tools of the sources have changed. Never journalled.
    pub(crate) fn tools_listed(&mut self, tools: Vec<ToolSpec>, silent: Vec<String>) {
        let withheld = self.state.definitions.withheld(&tools);
        let own_tools = self.own_tools(self.offer.wake_events());
        let in_turn = self.state.turn.is_some();
        let listed = ToolList { tools, silent };
        self.offer.tools_changed(listed, withheld, own_tools, in_turn);
        self.definitions_settled = false;
    }

    /// Pins what is accepted, and opens and closes the gates of the rest.
    pub(crate) fn settle_definitions(&mut self, out: &mut EffectBuffer) {
        if std::mem::replace(&mut self.definitions_settled, true) {
            return;
        }
        let listed = self.offer.listed().clone();
        let mut servers = self.state.definitions.compare(&listed.tools);
        // The gate of a server that has nothing left to approve closes. One that has not answered is not known to have nothing.
        let gates = self.state.definitions.gates().map(|(name, _)| name.clone());
        let gone: Vec<String> = gates
            .filter(|name| !listed.silent.contains(name) && !servers.contains_key(name))
            .collect();
        for name in gone {
            self.close_definition_gate(&name, "withdrawn", out);
        }
        for (name, found) in &mut servers {
            if found.is_first {
                self.pin_first(name, found, &listed.tools, out);
            } else if !found.accepted.is_empty() {
                self.pin_accepted(name, std::mem::take(&mut found.accepted), &listed.tools, out);
            }
            self.hold(name, (&found.held, &listed.tools), out);
        }
        self.state.definitions.keep_parts(&listed.tools);
        self.state.definitions.drop_servers(&listed);
    }

    /// The first definitions of a server, or those after an edit of where it is.
    fn pin_first(&mut self, name: &str, found: &mut ListedServer, listed: &[ToolSpec], out: &mut EffectBuffer) {
        self.close_definition_gate(name, "withdrawn", out);
        let tools = std::mem::take(&mut found.accepted);
        let count = tools.len();
        let pins = self.state.definitions.servers.entry(name.to_owned()).or_default();
        *pins = PinnedServer {
            server: found.server.clone(),
            gates: pins.gates,
            ..PinnedServer::default()
        };
        pins.pin(tools, listed);
        let note = match count {
            1 => format!("{name}: 1 tool"),
            _ => format!("{name}: {count} tools"),
        };
        out.record(journal_line(RecordKind::ToolsPinned, self.turn_number(), note));
    }

    fn pin_accepted(&mut self, name: &str, tools: Definitions, listed: &[ToolSpec], out: &mut EffectBuffer) {
        let Some(pins) = self.state.definitions.servers.get_mut(name) else {
            return;
        };
        let note = format!("{name}: {}", pins.names(&tools, listed));
        pins.pin(tools, listed);
        out.record(journal_line(RecordKind::ToolsChanged, self.turn_number(), note));
    }

    /// A gate is open for these definitions of a server, and for no others, unless a person has denied them.
    fn hold(&mut self, name: &str, (held, listed): (&Definitions, &[ToolSpec]), out: &mut EffectBuffer) {
        let Some(pins) = self.state.definitions.servers.get(name) else {
            return;
        };
        if pins.gate.as_ref().is_some_and(|gate| gate.tools == *held) {
            return;
        }
        let is_denied = pins.denied.as_ref().is_some_and(|denied| *denied == hash(held));
        let asks = !held.is_empty() && !is_denied;
        self.close_definition_gate(name, if asks { "superseded" } else { "withdrawn" }, out);
        if !asks {
            return;
        }
        // One place is kept for a call, which may hold the loop.
        if self.view_gates().len() >= MAX_GATES - 1 {
            self.definitions_settled = false;
            return;
        }
        let epoch = self.state.life.epoch();
        let turn = self.turn_number();
        let Some(pins) = self.state.definitions.servers.get_mut(name) else {
            return;
        };
        pins.gates = pins.gates.saturating_add(1);
        let id = format!("tools-{name}-e{epoch}-{}", pins.gates);
        let note = format!("{id}: {}", pins.names(held, listed));
        pins.gate = Some(DefinitionGate {
            id,
            opened_at: out.now,
            tools: held.clone(),
        });
        out.record(journal_line(RecordKind::GateOpened, turn, note));
    }

    fn close_definition_gate(&mut self, name: &str, how: &str, out: &mut EffectBuffer) -> Option<DefinitionGate> {
        let gate = self.state.definitions.servers.get_mut(name)?.gate.take()?;
        let note = format!("{} {how}", gate.id);
        out.record(journal_line(RecordKind::GateResolved, self.turn_number(), note));
        Some(gate)
    }

    /// A person answered a gate. Without effect if it is not an open gate for definitions, or with another hash.
    pub(crate) fn definition_gate_answered(&mut self, answer: &EngineGateAnswer, out: &mut EffectBuffer) {
        let asked = |gate: &DefinitionGate| gate.id == answer.gate && gate.hash() == answer.arguments;
        let mut gates = self.state.definitions.gates();
        let Some(name) = gates.find(|(_, gate)| asked(gate)).map(|(name, _)| name.clone()) else {
            return;
        };
        drop(gates);
        let Some(gate) = self.close_definition_gate(&name, &answer.how(), out) else {
            return;
        };
        let listed = &self.offer.listed().tools;
        if let Some(pins) = self.state.definitions.servers.get_mut(&name) {
            if answer.approved {
                pins.pin(gate.tools, listed);
            } else {
                pins.denied = Some(gate.hash());
            }
        }
        self.state.definitions.keep_parts(&self.offer.listed().tools);
        self.definitions_settled = false;
        self.withhold();
    }

    /// Offers what the pins allow: now, or from the next turn on.
    fn withhold(&mut self) {
        let withheld = self.state.definitions.withheld(&self.offer.listed().tools);
        let own_tools = self.own_tools(self.offer.wake_events());
        let in_turn = self.state.turn.is_some();
        self.offer.withheld_changed(withheld, own_tools, in_turn);
    }

    /// The open gates for definitions, by server.
    pub(crate) fn definition_gates(&self) -> impl Iterator<Item = OpenGate> {
        self.state.definitions.gates().map(|(name, gate)| OpenGate {
            gate: GateTerms {
                id: gate.id.clone(),
                kind: GateKind::ToolDefinitionsChanged,
                opened_at: gate.opened_at,
                expires_at: None,
            },
            tool: name.clone(),
            arguments: gate.hash(),
            because_of: None,
        })
    }

    /// Names the servers of which tools are withheld, for the model. The names of the tools are the servers' text.
    pub(crate) fn withheld_tools(&self) -> Option<String> {
        let names = self.offer.withheld().iter();
        let servers: BTreeSet<&str> = names.filter_map(|name| Some(name.split_once("__")?.0)).collect();
        let servers: Vec<&str> = servers.into_iter().collect();
        (!servers.is_empty()).then(|| {
            format!(
                "Tool servers that have changed or added tools, which are not offered until a person has approved them: {}.",
                servers.join(", ")
            )
        })
    }
}

/// Whether a definition differs from its pin, and then whether it needs an approval.
fn differs(declared: &DeclaredDefinition, pin: Option<&String>) -> Option<bool> {
    match pin {
        Some(pin) if *pin == declared.hash => None,
        Some(_) => Some(declared.holds_changes),
        None => Some(declared.holds_new),
    }
}

/// Hash of a set of definitions: the first 32 hexadecimal digits of SHA-256 over it as JSON with sorted names.
fn hash(tools: &Definitions) -> String {
    sha256_hex(json!(tools).to_string(), 16)
}

fn first_names(names: &[String]) -> String {
    let mut text = names[..names.len().min(MAX_NAMES)].join(", ");
    if names.len() > MAX_NAMES {
        let _ = write!(text, " and {} more", names.len() - MAX_NAMES);
    }
    text
}
