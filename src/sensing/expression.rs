//! Expressions of a Sensor: CEL over `payload`, `previous` and `now`, compiled once, and never long to evaluate.
//!
//! Owns what an expression may be made of and how much it may cost. The library counts no cost, so macros over lists become
//! functions that do; what could fail hard in it, such as times and bytes, is not offered. Text of a payload never gets into
//! an error.

// Of the library's kinds of steps, values and errors only some come up here.
#![allow(clippy::wildcard_enum_match_arm)]

mod functions;
mod parse_error;
mod values;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cel::common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, ListExpr, LiteralValue, operators};
use cel::{Context, ExecutionError, Program, Value as Cel};
use jiff::Timestamp;
use regex::{Regex, RegexBuilder};
use serde_json::Value;

use values::{TEXT_PER_COST, size, to_cel, to_json};

/// Most bytes of an expression.
pub const MOST_BYTES: usize = 4096;
/// Most steps into each other.
pub const MOST_DEPTH: usize = 64;
/// Most brackets within each other.
pub const MOST_BRACKETS: usize = 24;
/// Most characters of operators.
pub const MOST_OPERATORS: usize = 256;
/// Steps into each other for which the room of any thread is enough.
const SHALLOW: usize = 12;
/// The parser takes much for each bracket, an evaluation for each step; what is not touched costs nothing.
const STACK_BYTES: usize = 32 * 1024 * 1024;
/// Most that one evaluation may cost: about so many values and pieces of text are looked at.
pub const MOST_COST: u64 = 4_000_000;
/// Most patterns in all expressions of one Sensor.
pub const MOST_PATTERNS: usize = 32;
/// Most bytes of one pattern as it is written.
pub const MOST_PATTERN_BYTES: usize = 512;
/// Most bytes of one automaton of a compiled pattern, of which there are two: a few written bytes such as `\w{100}` grow to
/// as much as is allowed.
const PATTERN_BYTES: usize = 256 * 1024;
/// The same of patterns that cost less, smallest first.
const SMALL_PATTERNS: [usize; 2] = [16 * 1024, 64 * 1024];
/// So many bytes of an automaton cost one for each 32 bytes of the text that it goes through.
const PATTERN_PER_COST: usize = 1024;
/// Most bytes of a text that `json` makes: each `json` around another one doubles what is escaped.
pub const MOST_JSON_BYTES: usize = 4 * 1024 * 1024;

/// What an expression may name.
const VARIABLES: [&str; 3] = ["payload", "previous", "now"];
/// Functions, and how many values each is given, what it is called on included.
const FUNCTIONS: [(&str, usize); 14] = [
    ("contains", 2),
    ("size", 1),
    ("max", MANY),
    ("min", MANY),
    ("startsWith", 2),
    ("endsWith", 2),
    ("matches", 2),
    ("string", 1),
    ("double", 1),
    ("int", 1),
    ("slice", 3),
    ("epochSeconds", 1),
    ("lowerAscii", 1),
    ("json", 1),
];
/// One or more, and called on nothing.
const MANY: usize = 0;

/// Why an expression gave no value. Says nothing of the payload.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpressionError {
    /// It costs too much with this payload.
    #[error("costs too much with what came: narrow down the lists that it goes through")]
    TooCostly,
    /// A field or an item is not there.
    #[error("names a field or an item that is not in what came: ask with has() first")]
    Missing,
    /// An operator or a function does not take what it was given.
    #[error("does not fit the types of what came: numbers with and without a fraction need double() or int()")]
    Types,
    /// Anything else.
    #[error("cannot be evaluated with what came, such as a division by zero")]
    Other,
}

/// A compiled expression.
#[derive(Clone, Debug)]
pub struct Expression {
    tree: IdedExpr,
    patterns: Arc<[Pattern]>,
    weight: EvaluationCost,
    depth: usize,
    uses_previous: bool,
}

/// What the patterns of one Sensor may still take. A pattern is short as text and large once it is compiled, so that it is
/// their number that bounds the memory and the time of a Sensor.
#[derive(Debug)]
pub struct PatternAllowance {
    patterns: usize,
}

impl Default for PatternAllowance {
    fn default() -> Self {
        Self {
            patterns: MOST_PATTERNS,
        }
    }
}

impl PatternAllowance {
    fn pattern(&mut self, text: &str) -> Result<(), String> {
        if text.len() > MOST_PATTERN_BYTES {
            return Err(format!(
                "has a pattern in matches of {} bytes, and {MOST_PATTERN_BYTES} are allowed: shorten it",
                text.len()
            ));
        }
        let Some(left) = self.patterns.checked_sub(1) else {
            return Err(format!(
                "calls matches once too often: all expressions of a Sensor may have {MOST_PATTERNS} patterns; join patterns \
                 with |"
            ));
        };
        self.patterns = left;
        Ok(())
    }
}

/// A compiled pattern.
#[derive(Clone, Debug)]
struct Pattern {
    regex: Regex,
    /// What it costs for each [`values::TEXT_PER_COST`] bytes of a text. In the worst case all of the automaton is looked at
    /// for each byte.
    weight: u64,
}

impl Pattern {
    fn compile(text: &str) -> Option<Self> {
        let within = |bytes: usize| {
            RegexBuilder::new(text)
                .size_limit(bytes)
                .dfa_size_limit(PATTERN_BYTES)
                .build()
                .ok()
        };
        let regex = within(PATTERN_BYTES)?;
        let small = SMALL_PATTERNS.into_iter().find(|bytes| within(*bytes).is_some());
        let weight = small.unwrap_or(PATTERN_BYTES) / PATTERN_PER_COST;
        Some(Self {
            regex,
            weight: u64::try_from(weight).unwrap_or(u64::MAX),
        })
    }
}

/// What an expression sees.
#[derive(Clone, Debug)]
pub struct ExpressionVariables {
    payload: Cel,
    previous: Cel,
    now: i64,
    size: u64,
}

impl ExpressionVariables {
    /// Of one event.
    #[must_use]
    pub fn new(payload: &Value, previous: Option<&Value>, now: Timestamp) -> Self {
        let (payload, previous) = (to_cel(payload), previous.map_or(Cel::Null, to_cel));
        let size = size(&payload).saturating_add(size(&previous));
        Self {
            payload,
            previous,
            now: now.as_second(),
            size,
        }
    }
}

impl Expression {
    /// Compiles the only expression of a Sensor. The error says what is wrong with it, in words that go after its field's
    /// name.
    pub fn compile(text: &str) -> Result<Self, String> {
        Self::compile_within(text, &mut PatternAllowance::default())
    }

    /// Compiles one of the expressions of a Sensor, which share an allowance.
    pub fn compile_within(text: &str, allowance: &mut PatternAllowance) -> Result<Self, String> {
        if text.len() > MOST_BYTES {
            return Err(format!("may have {MOST_BYTES} bytes, and has {}", text.len()));
        }
        check_nesting(text)?;
        let mut tree = parse(text)?;
        let mut compiler = ExpressionCompiler {
            allowance,
            patterns: Vec::new(),
            weight: EvaluationCost::default(),
            depth: 0,
            uses_previous: false,
            item: None,
        };
        compiler.visit(&mut tree, 0)?;
        Ok(Self {
            tree,
            patterns: compiler.patterns.into(),
            weight: compiler.weight,
            depth: compiler.depth,
            uses_previous: compiler.uses_previous,
        })
    }

    /// Whether its value depends on the event before.
    #[must_use]
    pub fn uses_previous(&self) -> bool {
        self.uses_previous
    }

    /// Its value.
    pub fn evaluate(&self, variables: &ExpressionVariables) -> Result<Value, ExpressionError> {
        let purse = CostMeter::new(variables.size);
        if !purse.pay(self.weight, 0) {
            return Err(ExpressionError::TooCostly);
        }
        let mut context = Context::empty();
        functions::offer(&mut context, &purse, &self.patterns);
        context.add_variable_from_value("payload", variables.payload.clone());
        context.add_variable_from_value("previous", variables.previous.clone());
        context.add_variable_from_value("now", variables.now);
        let found = if self.depth > SHALLOW {
            with_room(|| context.resolve(&self.tree)).ok_or(ExpressionError::Other)?
        } else {
            context.resolve(&self.tree)
        };
        if purse.is_empty() {
            return Err(ExpressionError::TooCostly);
        }
        to_json(&found.map_err(|error| failure(&error))?).ok_or(ExpressionError::Types)
    }
}

fn parse(text: &str) -> Result<IdedExpr, String> {
    let parsed = with_room(|| {
        let parsed = Program::compile(text).map(|program| program.expression().clone());
        parsed.map_err(|errors| parse_error::describe_errors(text, &errors))
    });
    parsed.unwrap_or_else(|| Err("could not be parsed: there is no room for it now".into()))
}

/// Does something with more room than a thread of the runtime has. `None`: there is no such room.
fn with_room<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
        let running = thread.spawn_scoped(scope, work);
        running.ok().and_then(|running| running.join().ok())
    })
}

/// The parser goes into itself with each bracket and operator, as deep as a text asks for: such a text it does not get.
fn check_nesting(text: &str) -> Result<(), String> {
    let (mut brackets, mut operators) = (0_usize, 0_usize);
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(_), '\\') => drop(characters.next()),
            (Some(open), character) if open == character => quote = None,
            (Some(_), _) => continue,
            (None, '"' | '\'') => quote = Some(character),
            (None, '(' | '[' | '{') => brackets += 1,
            (None, ')' | ']' | '}') => brackets = brackets.saturating_sub(1),
            (None, '+' | '-' | '*' | '/' | '%' | '!' | '?' | '.' | '<' | '>' | '=' | '&' | '|') => operators += 1,
            (None, _) => {}
        }
        if brackets > MOST_BRACKETS || operators > MOST_OPERATORS {
            return Err(format!(
                "has more than {MOST_BRACKETS} brackets within each other or {MOST_OPERATORS} operators: make it simpler"
            ));
        }
    }
    Ok(())
}

/// How much one evaluation of a piece costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EvaluationCost {
    /// Steps.
    steps: u64,
    /// Of them those that name a variable of the event, which may be large.
    large: u64,
    /// Of them those that join two values: what they make grows.
    joins: u64,
}

/// Counts what an evaluation costs.
#[derive(Clone, Debug)]
struct CostMeter {
    left: Arc<AtomicU64>,
    size: u64,
}

impl CostMeter {
    fn new(size: u64) -> Self {
        Self {
            left: Arc::new(AtomicU64::new(MOST_COST)),
            size,
        }
    }

    /// Pays for one evaluation of a piece in which a variable of this size may stand. False: there is not enough left.
    fn pay(&self, weight: EvaluationCost, item: u64) -> bool {
        let small = weight.steps.saturating_mul(1 + item);
        let large = weight.large.saturating_mul(self.size);
        let cost = small.saturating_add(large).saturating_mul(1 + weight.joins);
        let left = self.left.load(Ordering::Relaxed);
        let after = left.saturating_sub(cost);
        self.left.store(after, Ordering::Relaxed);
        after > 0
    }

    /// Pays for a look at a text of so many bytes. False: there is not enough left.
    fn pay_for_text(&self, bytes: usize, weight: u64) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let steps = bytes.saturating_mul(weight) / TEXT_PER_COST;
        self.pay(
            EvaluationCost {
                steps,
                ..EvaluationCost::default()
            },
            0,
        )
    }

    /// What is left is not enough.
    fn empty(&self) {
        self.left.store(0, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }
}

/// Checks a tree, and makes it one that is cheap and counted.
struct ExpressionCompiler<'a> {
    allowance: &'a mut PatternAllowance,
    patterns: Vec<Pattern>,
    weight: EvaluationCost,
    depth: usize,
    uses_previous: bool,
    /// The variable of the macro whose body this is.
    item: Option<String>,
}

impl ExpressionCompiler<'_> {
    fn visit(&mut self, tree: &mut IdedExpr, depth: usize) -> Result<(), String> {
        if depth >= MOST_DEPTH {
            return Err(format!("goes deeper than {MOST_DEPTH} steps: make it simpler"));
        }
        self.weight.steps += 1;
        let depth = depth + 1;
        self.depth = self.depth.max(depth);
        match &mut tree.expr {
            Expr::Literal(LiteralValue::Bytes(_)) => Err("has bytes, which there are none of here".into()),
            Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.name(name),
            Expr::Select(select) => self.visit(&mut select.operand, depth),
            Expr::List(list) => list.elements.iter_mut().try_for_each(|item| self.visit(item, depth)),
            Expr::Map(map) => map.entries.iter_mut().try_for_each(|entry| match &mut entry.expr {
                EntryExpr::MapEntry(entry) => {
                    self.visit(&mut entry.key, depth)?;
                    self.visit(&mut entry.value, depth)
                }
                EntryExpr::StructField(_) => Err(no_types()),
            }),
            Expr::Call(call) => self.call(call, depth),
            Expr::Comprehension(comprehension) => {
                let taken = std::mem::take(&mut **comprehension);
                tree.expr = self.macro_of(taken, depth)?;
                Ok(())
            }
            Expr::Struct(_) | Expr::Unspecified => Err(no_types()),
        }
    }

    fn name(&mut self, name: &str) -> Result<(), String> {
        if self.item.as_deref() == Some(name) {
            return Ok(());
        }
        if !VARIABLES.contains(&name) {
            return Err(format!(
                "names {name}, which is not there: there are payload, previous and now"
            ));
        }
        self.weight.large += 1;
        self.uses_previous |= name == "previous";
        Ok(())
    }

    fn call(&mut self, call: &mut CallExpr, depth: usize) -> Result<(), String> {
        if is_operator(&call.func_name) {
            self.weight.joins += u64::from(call.func_name == operators::ADD);
        } else {
            check_function(call)?;
        }
        if call.func_name == "matches" {
            self.pattern(call)?;
        }
        if let Some(target) = &mut call.target {
            self.visit(target, depth)?;
        }
        call.args
            .iter_mut()
            .try_for_each(|argument| self.visit(argument, depth))
    }

    /// A pattern is compiled once: in its place stands its number.
    fn pattern(&mut self, call: &mut CallExpr) -> Result<(), String> {
        let Some(IdedExpr {
            expr: Expr::Literal(literal),
            ..
        }) = call.args.last_mut()
        else {
            return Err("calls matches with a pattern that is not written in the expression".into());
        };
        let LiteralValue::String(text) = literal else {
            return Err("calls matches with a pattern that is no text".into());
        };
        self.allowance.pattern(text.inner())?;
        let pattern = Pattern::compile(text.inner())
            .ok_or("has a pattern in matches that is no regular expression, or too large")?;
        *literal = LiteralValue::Int(i64::try_from(self.patterns.len()).unwrap_or(i64::MAX).into());
        self.patterns.push(pattern);
        Ok(())
    }

    /// A macro over a list, as a function that counts.
    fn macro_of(&mut self, found: ComprehensionExpr, depth: usize) -> Result<Expr, String> {
        if self.item.is_some() {
            return Err(
                "has one of all, exists, exists_one, filter and map within another: use one after the other".into(),
            );
        }
        let mut range = found.iter_range;
        self.visit(&mut range, depth)?;
        let item = IdedExpr {
            id: found.accu_init.id,
            expr: Expr::Ident(found.iter_var.clone()),
        };
        let (name, mut bodies) =
            taken_apart(&found.accu_init.expr, found.loop_step.expr).ok_or("has a macro that is not known")?;
        let outer = std::mem::take(&mut self.weight);
        self.item = Some(found.iter_var);
        bodies.iter_mut().try_for_each(|body| self.visit(body, depth))?;
        self.item = None;
        let inner = std::mem::replace(&mut self.weight, outer);
        let mut args = vec![range, item];
        args.extend(bodies);
        args.extend([inner.steps, inner.large, inner.joins].map(|number| IdedExpr {
            id: found.accu_init.id,
            expr: Expr::Literal(LiteralValue::Int(i64::try_from(number).unwrap_or(i64::MAX).into())),
        }));
        Ok(Expr::Call(CallExpr {
            func_name: name.into(),
            target: None,
            args,
        }))
    }
}

fn check_function(call: &CallExpr) -> Result<(), String> {
    let name = &call.func_name;
    let Some((_, wanted)) = FUNCTIONS.iter().find(|(known, _)| known == name) else {
        return Err(format!("calls {name}, which is not there"));
    };
    let given = call.args.len() + usize::from(call.target.is_some());
    match *wanted {
        MANY if call.target.is_some() || given == 0 => Err(format!("calls {name} in another way than {name}(a, b)")),
        MANY => Ok(()),
        wanted if wanted == given => Ok(()),
        wanted => Err(format!("gives {given} values to {name}, which takes {wanted}")),
    }
}

fn no_types() -> String {
    "makes an object of a type: write a map instead".into()
}

fn is_operator(name: &str) -> bool {
    // Operators are no names that anybody could write.
    name.starts_with(|first: char| !first.is_ascii_alphabetic())
}

/// Which macro it was, and what it does with each item.
fn taken_apart(start: &Expr, step: Expr) -> Option<(&'static str, Vec<IdedExpr>)> {
    let Expr::Call(mut step) = step else {
        return None;
    };
    match start {
        Expr::Literal(LiteralValue::Boolean(start)) => {
            let name = if *start.inner() { "@all" } else { "@exists" };
            Some((name, vec![step.args.pop()?]))
        }
        Expr::Literal(LiteralValue::Int(_)) => Some(("@one", vec![step.args.swap_remove(0)])),
        Expr::List(_) if step.func_name == operators::ADD => Some(("@map", vec![only(step.args.pop()?)?])),
        Expr::List(_) => {
            let condition = step.args.swap_remove(0);
            let added = step.args.into_iter().find_map(|argument| match argument.expr {
                Expr::Call(mut added) if added.func_name == operators::ADD => added.args.pop(),
                _ => None,
            })?;
            Some(("@filter", vec![condition, only(added)?]))
        }
        _ => None,
    }
}

/// The item of a list that has one.
fn only(list: IdedExpr) -> Option<IdedExpr> {
    match list.expr {
        Expr::List(ListExpr { mut elements, .. }) if elements.len() == 1 => elements.pop(),
        _ => None,
    }
}

fn failure(error: &ExecutionError) -> ExpressionError {
    match error {
        ExecutionError::NoSuchKey(_) | ExecutionError::IndexOutOfBounds(_) => ExpressionError::Missing,
        ExecutionError::DivisionByZero(_)
        | ExecutionError::RemainderByZero(_)
        | ExecutionError::Overflow(..)
        | ExecutionError::FunctionError { .. } => ExpressionError::Other,
        _ => ExpressionError::Types,
    }
}

#[cfg(test)]
mod tests;
