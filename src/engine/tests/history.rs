//! What the journal stores about each step.

use super::work::wants;
use super::*;

impl Driver {
    fn reads(&mut self, result: &str) {
        self.answer(wants(&["files__read"]));
        self.done(1, result);
    }
}

#[test]
fn test_loop_history_keeps_each_step_in_order_also_of_a_turn_that_failed() {
    let mut driver = Driver::with_tools(settings());
    driver.reads("one");
    driver.answer(says("done"));
    driver.next_timer();
    driver.reads("two");
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    driver.answer(says("again"));
    let kinds: Vec<RecordKind> = driver.journal.iter().map(|record| record.kind).collect();
    let call = [RecordKind::CallStarted, RecordKind::CallAnswered];
    let tool = [RecordKind::ToolIntent, RecordKind::ToolOutcome];
    let mut expected = vec![RecordKind::TurnStarted];
    expected.extend(call.iter().chain(&tool).chain(&call));
    expected.extend([RecordKind::TurnCompleted, RecordKind::TurnStarted]);
    expected.extend(call.iter().chain(&tool));
    expected.extend([RecordKind::CallStarted, RecordKind::CallFailed, RecordKind::TurnFailed]);
    expected.push(RecordKind::TurnStarted);
    expected.extend(call);
    expected.push(RecordKind::TurnCompleted);
    let of_turns = |kind: &RecordKind| !matches!(kind, RecordKind::Started | RecordKind::Transition);
    assert_eq!(kinds.into_iter().filter(of_turns).collect::<Vec<_>>(), expected);
    // What the failed turn has read is kept, since it was paid for.
    let all = driver.journal.iter().flat_map(|record| &record.messages);
    let results = |messages: Vec<&Arc<Message>>| {
        messages
            .iter()
            .filter(|one| matches!(****one, Message::Tool { .. }))
            .count()
    };
    assert_eq!(results(all.collect()), 2);
    assert_eq!(results(driver.transcript.iter().collect()), 2);
}
