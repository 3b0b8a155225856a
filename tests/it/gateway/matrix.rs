//! Each fault of a provider in each wire format, streamed and whole, through a real gateway and a real worker: what the
//! loop does next, what the model sees, and what is counted.

use std::time::Duration;

use agentloop::api::failure::FailureKind::{self, *};
use agentloop::api::status::PauseReason;
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::loops::{Cell, USED, WAYS, Way, call_of};
use super::provider::{ScriptedResponse, Step, send};

/// Worlds at a time.
const AT_ONCE: usize = 6;
/// Arguments that are cut.
const HALF: &str = "{\"sleep\": ";

/// What a server does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    RateInSeconds,
    RateForLong,
    RateAsDate,
    Quota,
    Internal,
    Overloaded,
    BadKey,
    BadRequest,
    TooLong,
    Moved,
    Conflict,
    ForeignError,
    ProxyError,
    ProxyTimeout,
    Silent,
    CutInToolCall,
    ErrorInAnswer,
    RateInAnswer,
    QuotaInAnswer,
    TooLongInAnswer,
    RateAfterContent,
    HalfArguments,
    NoUsage,
    SameIds,
    Refusal,
}

/// What the loop does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The same call again, byte for byte, after this wait at least.
    Again(Duration),
    /// Nothing: it is paused.
    Paused(PauseReason),
    /// The turn has failed and its messages are gone: the next turn.
    FailedTurn,
    /// It continues, in a call whose prompt has these texts.
    GoesOn(&'static str, &'static [&'static str]),
}

/// What is counted of the faulty call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    /// A call without tokens: the server refused it.
    NoTokens,
    /// A call of unknown use; a budget is charged its worst case.
    Unknown,
    /// What the server said.
    Said,
}

/// What each fault leads to, in every way: the last error of the loop, what follows, what is counted.
const EXPECTED: [(Fault, Option<FailureKind>, Next, Counted); 25] = [
    (
        Fault::RateInSeconds,
        Some(RateLimited),
        Next::Again(Duration::from_secs(1)),
        Counted::NoTokens,
    ),
    (
        Fault::RateForLong,
        Some(RateLimited),
        Next::Paused(PauseReason::ProviderRateLimit),
        Counted::NoTokens,
    ),
    (
        Fault::RateAsDate,
        Some(RateLimited),
        Next::Paused(PauseReason::ProviderRateLimit),
        Counted::NoTokens,
    ),
    (
        Fault::Quota,
        Some(QuotaExceeded),
        Next::Paused(PauseReason::QuotaExceeded),
        Counted::NoTokens,
    ),
    (
        Fault::Internal,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::NoTokens,
    ),
    (
        Fault::Overloaded,
        Some(Unreachable),
        Next::Again(Duration::from_secs(1)),
        Counted::NoTokens,
    ),
    (
        Fault::BadKey,
        Some(AuthenticationFailed),
        Next::Paused(PauseReason::AuthenticationFailed),
        Counted::NoTokens,
    ),
    (
        Fault::BadRequest,
        Some(BadResponse),
        Next::FailedTurn,
        Counted::NoTokens,
    ),
    (
        Fault::TooLong,
        Some(ContextExceeded),
        Next::FailedTurn,
        Counted::NoTokens,
    ),
    (Fault::Moved, Some(BadResponse), Next::FailedTurn, Counted::Unknown),
    (
        Fault::Conflict,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::ForeignError,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::ProxyError,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::ProxyTimeout,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::Silent,
        Some(Timeout),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::CutInToolCall,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::ErrorInAnswer,
        Some(Unreachable),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::RateInAnswer,
        Some(RateLimited),
        Next::Again(Duration::ZERO),
        Counted::NoTokens,
    ),
    (
        Fault::QuotaInAnswer,
        Some(QuotaExceeded),
        Next::Paused(PauseReason::QuotaExceeded),
        Counted::NoTokens,
    ),
    (
        Fault::TooLongInAnswer,
        Some(ContextExceeded),
        Next::FailedTurn,
        Counted::NoTokens,
    ),
    (
        Fault::RateAfterContent,
        Some(RateLimited),
        Next::Again(Duration::ZERO),
        Counted::Unknown,
    ),
    (
        Fault::HalfArguments,
        None,
        Next::GoesOn("t1c2a1", &["malformed", "write the arguments as one JSON object"]),
        Counted::Said,
    ),
    (
        Fault::NoUsage,
        None,
        Next::GoesOn("t2c1a1", &["words"]),
        Counted::Unknown,
    ),
    (
        Fault::SameIds,
        None,
        Next::GoesOn("t1c2a1", &["unknown tool"]),
        Counted::Said,
    ),
    (
        Fault::Refusal,
        Some(BadResponse),
        Next::GoesOn("t2c1a1", &["refused or filtered your last answer"]),
        Counted::Said,
    ),
];

impl Way {
    fn act(self, fault: Fault) -> ScriptedResponse {
        let (tool_use, stop) = if self.is_anthropic() {
            ("tool_use", "end_turn")
        } else {
            ("tool_calls", "stop")
        };
        match fault {
            Fault::RateInSeconds => error(429, "rate_limit_error").with("retry-after", "1"),
            Fault::RateForLong => error(429, "rate_limit_error").with("retry-after", "600"),
            Fault::RateAsDate => {
                let date = jiff::Timestamp::now() + jiff::SignedDuration::from_mins(10);
                let date = date.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
                error(429, "rate_limit_error").with("retry-after", date)
            }
            Fault::Quota if self.is_anthropic() => error(429, "billing_error"),
            Fault::Quota => error(429, "insufficient_quota"),
            Fault::Internal => error(500, "api_error"),
            Fault::Overloaded => error(529, "overloaded_error").with("retry-after", "1"),
            Fault::BadKey => error(401, "authentication_error"),
            Fault::BadRequest => error(400, "invalid_request_error"),
            Fault::TooLong => ScriptedResponse::json(
                400,
                r#"{"error":{"type":"invalid_request_error","message":"prompt is too long: 214468 tokens > 200000 maximum canary-error"}}"#,
            ),
            Fault::Moved => ScriptedResponse::json(307, "").with("location", "http://127.0.0.1:1/"),
            Fault::Conflict => error(409, "conflict_error"),
            // A proxy that gave up leaves a model behind that continues, and bills.
            Fault::ForeignError => ScriptedResponse::json(500, "<html>canary-error</html>"),
            Fault::ProxyError => ScriptedResponse::json(502, "<html>canary-error</html>"),
            Fault::ProxyTimeout => ScriptedResponse::json(504, "<html>canary-error</html>"),
            Fault::Silent => self.half(HALF, Step::Hold),
            Fault::CutInToolCall => self.half(HALF, Step::Cut),
            Fault::ErrorInAnswer if self.is_streamed() => self.half(
                HALF,
                send("data: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n"),
            ),
            Fault::ErrorInAnswer => error(200, "overloaded_error"),
            Fault::RateInAnswer => self.error_in_answer("rate_limit_exceeded"),
            Fault::QuotaInAnswer => self.error_in_answer("insufficient_quota"),
            Fault::TooLongInAnswer => self.error_in_answer("context_length_exceeded"),
            Fault::RateAfterContent => self.half(HALF, send(&self.error_event("rate_limit_exceeded"))),
            Fault::HalfArguments => self.answer("", &[("a", "yield", HALF)], tool_use, true),
            Fault::NoUsage => self.answer("words", &[], stop, false),
            Fault::SameIds => {
                let calls = [("a", "one", "{}"), ("a", "two", "{}")];
                self.answer("", &calls, tool_use, true)
            }
            Fault::Refusal if self.is_anthropic() => self.answer("no", &[], "refusal", true),
            Fault::Refusal => self.answer("no", &[], "content_filter", true),
        }
    }
}

impl Way {
    /// An answer with nothing but an error: in a stream after its first event.
    fn error_in_answer(self, code: &str) -> ScriptedResponse {
        if !self.is_streamed() {
            return error(200, code);
        }
        let begin = if self == Self::ResponsesStreamed {
            "data: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"output\":[],\"error\":null}}\n\n"
        } else {
            ": begun\n\n"
        };
        ScriptedResponse::stream(vec![send(begin), send(&self.error_event(code))])
    }

    /// The event with which a stream reports an error.
    fn error_event(self, code: &str) -> String {
        let error = json!({"type": code, "code": code, "message": "canary-error"});
        let event = if self == Self::ResponsesStreamed {
            json!({"type": "response.failed", "response": {"status": "failed", "error": error}})
        } else {
            json!({"type": "error", "error": error})
        };
        format!("data: {event}\n\n")
    }
}

/// An error of this type.
fn error(status: u16, kind: &str) -> ScriptedResponse {
    let error = json!({"type": kind, "code": kind, "message": "canary-error"});
    ScriptedResponse::json(status, &json!({"type": "error", "error": error}).to_string())
}

/// A loop whose first call meets the fault. Whatever it does next, it meets good answers.
async fn start(fault: Fault, way: Way) -> Cell {
    let limit = match (fault == Fault::Silent, way.is_streamed()) {
        (false, _) => json!({}),
        // Long enough for the good call that follows, also on a busy machine.
        (true, true) => json!({"streamIdleTimeoutSeconds": 5}),
        (true, false) => json!({"timeoutSeconds": 5}),
    };
    Cell::start(way, &limit, json!({}), vec![way.act(fault), way.sleep(), way.sleep()]).await
}

/// The ids of tool calls in a prompt, and those that results answer.
fn ids(body: &Value) -> (Vec<String>, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (mut asked, mut answered) = (Vec::new(), Vec::new());
    for item in body["input"].as_array().into_iter().flatten() {
        match item["type"].as_str() {
            Some("function_call") => asked.push(text(&item["call_id"])),
            Some("function_call_output") => answered.push(text(&item["call_id"])),
            _ => {}
        }
    }
    for message in body["messages"].as_array().into_iter().flatten() {
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        asked.extend(calls.map(|call| text(&call["id"])));
        answered.extend(message.get("tool_call_id").map(text));
        for block in message["content"].as_array().into_iter().flatten() {
            match block["type"].as_str() {
                Some("tool_use") => asked.push(text(&block["id"])),
                Some("tool_result") => answered.push(text(&block["tool_use_id"])),
                _ => {}
            }
        }
    }
    (asked, answered)
}

/// What is not as it should be; empty: all is.
async fn faults_of(cell: &Cell, error: Option<FailureKind>, next: Next, counted: Counted) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |what: &str, holds: bool, seen: String| {
        if !holds {
            wrong.push(format!("{what}: {seen}"));
        }
    };
    if let Next::Again(wait) = next {
        cell.harness.provider.until_asked(2).await;
        let seen = cell.harness.provider.seen();
        let waited = seen[1].at.duration_since(seen[0].at);
        check(
            "waits as long as the server asked",
            waited >= wait,
            format!("{waited:?}"),
        );
    }
    let (report, of_loop) = cell.at_rest().await;
    let seen = cell.harness.provider.seen();
    let calls: Vec<&str> = seen.iter().map(call_of).collect();
    let expected = match next {
        Next::Again(_) => vec!["t1c1a1", "t1c1a2"],
        Next::Paused(_) => vec!["t1c1a1"],
        Next::FailedTurn => vec!["t1c1a1", "t2c1a1"],
        Next::GoesOn(second, _) => vec!["t1c1a1", second],
    };
    check("calls", calls == expected, format!("{calls:?}"));
    let kind = of_loop.last_error.as_ref().map(|error| error.kind.clone());
    check(
        "last error",
        kind == error.map(|kind| kind.to_string()),
        format!("{kind:?}"),
    );
    let discreet =
        !serde_json::to_string(&report).unwrap().contains("canary") && !cell.harness.log().contains("canary-error");
    check("says nothing of the server's words", discreet, format!("{report:?}"));
    let reasons: Vec<PauseReason> = of_loop.reasons.iter().map(|held| held.reason).collect();
    match next {
        Next::Paused(reason) => check("reasons", reasons == [reason], format!("{reasons:?}")),
        Next::Again(_) => check(
            "sends the same again",
            seen[0].body == seen[1].body,
            seen[1].body.clone(),
        ),
        Next::FailedTurn => {
            let roles = serde_json::from_str::<Value>(&seen[1].body).unwrap();
            let failed = of_loop.counts.turns == 1 && ids(&roles) == (vec![], vec![]);
            check("one turn failed and left nothing", failed, seen[1].body.clone());
        }
        Next::GoesOn(_, texts) => {
            for text in texts {
                check(text, seen[1].body.contains(text), seen[1].body.clone());
            }
        }
    }
    if let Some(second) = seen.get(1) {
        let (asked, answered) = ids(&serde_json::from_str(&second.body).unwrap());
        let unique: std::collections::BTreeSet<&String> = asked.iter().collect();
        let paired = asked == answered && unique.len() == asked.len();
        check(
            "each call has an id and one result",
            paired,
            format!("{asked:?} {answered:?}"),
        );
    }
    let good = i64::try_from(seen.len()).unwrap() - i64::from(counted != Counted::Said);
    let usage = (
        report.usage.unknown_calls,
        report.usage.input_tokens,
        report.usage.output_tokens,
    );
    let as_counted = (i64::from(counted == Counted::Unknown), good * USED.0, good * USED.1);
    check("counted", usage == as_counted, format!("{usage:?}"));
    wrong
}

#[tokio::test]
async fn each_fault_in_each_format_streamed_and_whole_has_one_outcome() {
    let cells = EXPECTED.iter().flat_map(|expected| WAYS.map(|way| (expected, way)));
    // A whole answer has no content before its error.
    let cells = cells.filter(|((fault, ..), way)| *fault != Fault::RateAfterContent || way.is_streamed());
    let results = stream::iter(cells).map(|((fault, error, next, counted), way)| async move {
        let cell = start(*fault, way).await;
        let wrong = faults_of(&cell, *error, *next, *counted).await;
        cell.end().await;
        wrong
            .into_iter()
            .map(move |wrong| format!("{fault:?} {way:?}: {wrong}"))
    });
    let wrong: Vec<String> = results.buffer_unordered(AT_ONCE).flat_map(stream::iter).collect().await;
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
