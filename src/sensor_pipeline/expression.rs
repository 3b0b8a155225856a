//! Expressions of Sensors and of approval conditions: CEL, compiled once, with a bounded cost of evaluation.
//!
//! Owns which constructs an expression may contain and how much it may cost. The CEL library does not meter cost, so
//! macros over lists are rewritten to functions that do. Features of the library that could panic, such as times and
//! bytes, are not offered. Errors never contain text of a payload.

// Only some of the library's kinds of nodes, values and errors occur here.
#![allow(clippy::wildcard_enum_match_arm)]

mod functions;
mod lexer;
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

/// Maximum number of bytes of an expression.
pub const MAX_BYTES: usize = 4096;
/// Maximum number of nested nodes.
pub const MAX_DEPTH: usize = 64;
/// Maximum number of nested brackets.
pub const MAX_BRACKETS: usize = 24;
/// Maximum number of operator characters.
pub const MAX_OPERATORS: usize = 256;
/// Nesting for which the stack of any thread suffices.
const SHALLOW: usize = 12;
/// Stack size of the helper thread: the parser needs much for each bracket, an evaluation for each node. Untouched
/// stack costs no memory.
const STACK_BYTES: usize = 32 * 1024 * 1024;
/// Maximum cost of one evaluation, in values and pieces of text that are visited.
pub const MAX_COST: u64 = 4_000_000;
/// Maximum number of patterns in all expressions of one Sensor.
pub const MAX_PATTERNS: usize = 32;
/// Maximum number of bytes of one pattern's text.
pub const MAX_PATTERN_BYTES: usize = 512;
/// Maximum number of bytes of one automaton of a compiled pattern, of which there are two. A short pattern such as
/// `\w{100}` grows to whatever is allowed.
const PATTERN_BYTES: usize = 256 * 1024;
/// Size classes of patterns that cost less, smallest first.
const SMALL_PATTERNS: [usize; 2] = [16 * 1024, 64 * 1024];
/// This many bytes of an automaton cost 1 for each 32 bytes of text that it scans.
const PATTERN_PER_COST: usize = 1024;
/// Maximum number of bytes of a string that `json` returns: each nested `json` doubles the escapes.
pub const MAX_JSON_BYTES: usize = 4 * 1024 * 1024;

/// What an expression is about, which decides its variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpressionScope {
    /// An event of a Sensor: `payload`, `previous` and `now`.
    SensorEvent,
    /// A tool call: `arguments`.
    ToolCall,
}

impl ExpressionScope {
    fn variables(self) -> &'static [&'static str] {
        match self {
            Self::SensorEvent => &["payload", "previous", "now"],
            Self::ToolCall => &["arguments"],
        }
    }

    /// The variables, for the author of an expression.
    fn list(self) -> &'static str {
        match self {
            Self::SensorEvent => "payload, previous or now",
            Self::ToolCall => "arguments",
        }
    }

    /// A field, as an example.
    fn field(self) -> &'static str {
        match self {
            Self::SensorEvent => "payload.price",
            Self::ToolCall => "arguments.amount",
        }
    }
}

/// Functions, and their number of arguments, including the receiver of a method call.
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
/// One or more arguments, and no receiver.
const MANY: usize = 0;

/// Why an evaluation failed. Contains nothing of the payload.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpressionError {
    /// It costs too much with this payload.
    #[error("costs too much with this payload: reduce the lists that it iterates over")]
    TooCostly,
    /// A field or an item does not exist.
    #[error("refers to a field or an item that the payload does not have: check with has() first")]
    Missing,
    /// An operator or a function does not accept the types of its arguments.
    #[error("does not fit the types in the payload: convert integers and doubles with double() or int()")]
    Types,
    /// Any other error.
    #[error("cannot be evaluated with this payload, for example because of a division by zero")]
    Other,
}

#[derive(Clone, Debug)]
pub struct Expression {
    tree: IdedExpr,
    patterns: Arc<[Pattern]>,
    weight: EvaluationCost,
    depth: usize,
    uses_previous: bool,
}

/// The patterns that the expressions of one object may still contain. A pattern is short as text and large once
/// compiled, so their number bounds the memory and the time of a Sensor.
#[derive(Debug)]
pub struct PatternAllowance {
    patterns: usize,
}

impl Default for PatternAllowance {
    fn default() -> Self {
        Self { patterns: MAX_PATTERNS }
    }
}

impl PatternAllowance {
    fn pattern(&mut self, text: &str) -> Result<(), String> {
        if text.len() > MAX_PATTERN_BYTES {
            return Err(format!(
                "has a pattern in matches of {} bytes, and {MAX_PATTERN_BYTES} are allowed: shorten it",
                text.len()
            ));
        }
        let Some(left) = self.patterns.checked_sub(1) else {
            return Err(format!(
                "calls matches too often: the expressions may have {MAX_PATTERNS} patterns in total; join them with |"
            ));
        };
        self.patterns = left;
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct Pattern {
    regex: Regex,
    /// Cost for each [`values::TEXT_PER_COST`] bytes of text. In the worst case the whole automaton is visited for each
    /// byte.
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

/// The variables of one evaluation.
#[derive(Clone, Debug)]
pub struct ExpressionVariables {
    values: Vec<(&'static str, Cel)>,
    size: u64,
}

impl ExpressionVariables {
    /// Those of [`ExpressionScope::SensorEvent`].
    #[must_use]
    pub fn new(payload: &Value, previous: Option<&Value>, now: Timestamp) -> Self {
        let (payload, previous) = (to_cel(payload), previous.map_or(Cel::Null, to_cel));
        let size = size(&payload).saturating_add(size(&previous));
        let now = Cel::Int(now.as_second());
        Self {
            values: vec![("payload", payload), ("previous", previous), ("now", now)],
            size,
        }
    }

    /// Those of [`ExpressionScope::ToolCall`].
    #[must_use]
    pub fn of_call(arguments: &Value) -> Self {
        let arguments = to_cel(arguments);
        Self {
            size: size(&arguments),
            values: vec![("arguments", arguments)],
        }
    }
}

impl Expression {
    /// Compiles a single expression. The error is text that follows the name of its field.
    pub fn compile(text: &str, scope: ExpressionScope) -> Result<Self, String> {
        Self::compile_within(text, scope, &mut PatternAllowance::default())
    }

    /// Compiles one of the expressions that share an allowance.
    pub fn compile_within(
        text: &str,
        scope: ExpressionScope,
        allowance: &mut PatternAllowance,
    ) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("must be at most {MAX_BYTES} bytes, and has {}", text.len()));
        }
        check_nesting(text)?;
        let mut tree = parse(text, scope)?;
        let mut compiler = ExpressionCompiler {
            scope,
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

    /// Whether its value depends on the previous event.
    #[must_use]
    pub fn uses_previous(&self) -> bool {
        self.uses_previous
    }

    pub fn evaluate(&self, variables: &ExpressionVariables) -> Result<Value, ExpressionError> {
        let purse = CostMeter::new(variables.size);
        if !purse.pay(self.weight, 0) {
            return Err(ExpressionError::TooCostly);
        }
        let mut context = Context::empty();
        functions::offer(&mut context, &purse, &self.patterns);
        for (name, value) in &variables.values {
            context.add_variable_from_value(*name, value.clone());
        }
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

fn parse(text: &str, scope: ExpressionScope) -> Result<IdedExpr, String> {
    let parsed = with_room(|| {
        let parsed = Program::compile(text).map(|program| program.expression().clone());
        parsed.map_err(|errors| parse_error::describe_errors(text, scope.field(), &errors))
    });
    parsed.unwrap_or_else(|| Err("cannot be parsed now: not enough memory".into()))
}

/// Runs `work` on a thread with a large stack. `None`: the thread could not be started. A panic is none of the errors that this
/// returns: a release ends with it.
fn with_room<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
        let running = thread.spawn_scoped(scope, work);
        running.ok().and_then(|running| running.join().ok())
    })
}

/// Bounds the recursion of the parser, which descends with each bracket and operator, before it sees the text. The lexer does not
/// stop at a mistake, so that what is wrong counts too.
fn check_nesting(text: &str) -> Result<(), String> {
    let (mut brackets, mut operators) = (0_usize, 0_usize);
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        if let Some(opaque) = lexer::opaque_bytes(rest) {
            rest = rest.get(opaque..).unwrap_or_default();
            continue;
        }
        rest = rest.get(character.len_utf8()..).unwrap_or_default();
        match character {
            '(' | '[' | '{' => brackets += 1,
            ')' | ']' | '}' => brackets = brackets.saturating_sub(1),
            '+' | '-' | '*' | '/' | '%' | '!' | '?' | '.' | '<' | '>' | '=' | '&' | '|' => operators += 1,
            _ => {}
        }
        if brackets > MAX_BRACKETS || operators > MAX_OPERATORS {
            return Err(format!(
                "has more than {MAX_BRACKETS} nested brackets or {MAX_OPERATORS} operators: simplify it"
            ));
        }
    }
    Ok(())
}

/// Cost of one evaluation of a subtree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EvaluationCost {
    steps: u64,
    /// Number of nodes that name a variable of the event, which may be large.
    large: u64,
    /// Number of nodes that concatenate two values, whose results grow.
    joins: u64,
}

/// Meters the cost of an evaluation.
#[derive(Clone, Debug)]
struct CostMeter {
    left: Arc<AtomicU64>,
    size: u64,
}

impl CostMeter {
    fn new(size: u64) -> Self {
        Self {
            left: Arc::new(AtomicU64::new(MAX_COST)),
            size,
        }
    }

    /// Pays for one evaluation of a subtree whose item variable has this size. False: the budget is exhausted.
    fn pay(&self, weight: EvaluationCost, item: u64) -> bool {
        let small = weight.steps.saturating_mul(1 + item);
        let large = weight.large.saturating_mul(self.size);
        let cost = small.saturating_add(large).saturating_mul(1 + weight.joins);
        let left = self.left.load(Ordering::Relaxed);
        let after = left.saturating_sub(cost);
        self.left.store(after, Ordering::Relaxed);
        after > 0
    }

    /// Pays for a scan of a text with this many bytes. False: the budget is exhausted.
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

    /// Exhausts the budget.
    fn empty(&self) {
        self.left.store(0, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }
}

/// Validates a tree, and rewrites it to one whose cost is metered.
struct ExpressionCompiler<'a> {
    scope: ExpressionScope,
    allowance: &'a mut PatternAllowance,
    patterns: Vec<Pattern>,
    weight: EvaluationCost,
    depth: usize,
    uses_previous: bool,
    /// The variable of the macro whose body is being visited.
    item: Option<String>,
}

impl ExpressionCompiler<'_> {
    fn visit(&mut self, tree: &mut IdedExpr, depth: usize) -> Result<(), String> {
        if depth >= MAX_DEPTH {
            return Err(format!("is nested deeper than {MAX_DEPTH} levels: simplify it"));
        }
        self.weight.steps += 1;
        let depth = depth + 1;
        self.depth = self.depth.max(depth);
        match &mut tree.expr {
            Expr::Literal(LiteralValue::Bytes(_)) => Err("has a bytes literal, which is not supported".into()),
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
        if !self.scope.variables().contains(&name) {
            return Err(format!("refers to unknown variable {name}: use {}", self.scope.list()));
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

    /// Compiles a literal pattern once, and replaces it with its index.
    fn pattern(&mut self, call: &mut CallExpr) -> Result<(), String> {
        let Some(IdedExpr {
            expr: Expr::Literal(literal),
            ..
        }) = call.args.last_mut()
        else {
            return Err("calls matches with a pattern that is not a literal".into());
        };
        let LiteralValue::String(text) = literal else {
            return Err("calls matches with a pattern that is not a string".into());
        };
        self.allowance.pattern(text.inner())?;
        let pattern = Pattern::compile(text.inner())
            .ok_or("has a pattern in matches that is not a valid regular expression, or is too large")?;
        *literal = LiteralValue::Int(i64::try_from(self.patterns.len()).unwrap_or(i64::MAX).into());
        self.patterns.push(pattern);
        Ok(())
    }

    /// Rewrites a macro over a list to a metered function.
    fn macro_of(&mut self, found: ComprehensionExpr, depth: usize) -> Result<Expr, String> {
        if self.item.is_some() {
            return Err(
                "nests all, exists, exists_one, filter or map in each other: use them one after the other".into(),
            );
        }
        let mut range = found.iter_range;
        self.visit(&mut range, depth)?;
        let item = IdedExpr {
            id: found.accu_init.id,
            expr: Expr::Ident(found.iter_var.clone()),
        };
        let (name, mut bodies) =
            taken_apart(&found.accu_init.expr, found.loop_step.expr).ok_or("has an unknown macro")?;
        // The bodies are weighed separately: their cost is paid per item at evaluation, and passed to the function as
        // the last three arguments.
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
        return Err(format!("calls unknown function {name}"));
    };
    let given = call.args.len() + usize::from(call.target.is_some());
    match *wanted {
        MANY if call.target.is_some() || given == 0 => Err(format!("must call {name} as {name}(a, b)")),
        MANY => Ok(()),
        wanted if wanted == given => Ok(()),
        wanted => Err(format!("passes {given} arguments to {name}, which takes {wanted}")),
    }
}

fn no_types() -> String {
    "creates a typed object: use a map instead".into()
}

fn is_operator(name: &str) -> bool {
    // Operators have names that are not identifiers.
    name.starts_with(|first: char| !first.is_ascii_alphabetic())
}

/// Which macro a comprehension came from, and its bodies for each item.
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

/// The item of a list with one element.
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
