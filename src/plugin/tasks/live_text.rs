//! The text of an answer on the screen while the model writes it, and what remains to be printed at the end.
//!
//! Fragments may be missing, repeated or void: the response of the task decides what the answer is.

use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::link::task_requests::ID_PREFIX;
use crate::link::text_fragments::TextFragment;
use crate::plugin::failure::{ExitStatus, PluginError};
use crate::plugin::screens::printable;
use crate::plugin::session::Screen;
use crate::plugin::tasks::task_run::ReceivedTaskResponse;

/// Stands for text that did not arrive.
const GAP: &str = " […] ";
/// Precedes a response after text that is not its beginning.
const WHOLE: &str = "the text above is incomplete; the whole response is:";
/// Follows text of an attempt that failed.
const VOID: &str = "the model call failed and is retried: ignore the text above";

/// What was printed of the answer to one task.
#[derive(Debug)]
pub struct LiveText {
    /// Id of the task in the events.
    task: String,
    /// Whether control characters are replaced: for terminals, not for programs.
    is_terminal: bool,
    /// The model call whose text is printed, whichever attempt it is, and the attempt. Empty: nothing was printed.
    call: (String, u32),
    /// The text that was printed of the attempt.
    shown: String,
    /// The offset after it.
    end: u64,
    /// Some text is missing in `shown`.
    has_gap: bool,
    /// The output could not be written: what was printed does not count.
    is_lost: bool,
    /// The last line that was printed has no end yet.
    pub(super) has_open_line: Arc<AtomicBool>,
}

impl LiveText {
    /// For the task that is requested with this key.
    #[must_use]
    pub fn new(key: &str, is_terminal: bool) -> Self {
        Self {
            task: format!("{ID_PREFIX}{key}"),
            is_terminal,
            call: Default::default(),
            shown: String::new(),
            end: 0,
            has_gap: false,
            is_lost: false,
            has_open_line: Arc::default(),
        }
    }

    /// Prints a fragment, as far as it is of this task and new.
    pub fn show(&mut self, fragment: &TextFragment, out: &mut (dyn Write + Send)) {
        let Some(text) = self.advance(fragment) else { return };
        let written = out
            .write_all(self.printable(&text).as_bytes())
            .and_then(|()| out.flush());
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => self.is_lost = true,
            _ => self.has_open_line.store(!text.ends_with('\n'), Ordering::Relaxed),
        }
    }

    /// Ends the line that was begun, if any.
    pub fn end_line(&self, out: &mut (dyn Write + Send)) {
        if self.has_open_line.swap(false, Ordering::Relaxed) {
            let _ = writeln!(out);
        }
    }

    /// Prints what remains of a response. A task that has failed without a result has none, not an empty one.
    pub fn finish_response(&self, response: &ReceivedTaskResponse, screen: &mut Screen<'_>) -> Result<(), PluginError> {
        let text = response.result_text();
        if text.is_empty() && response.exit_status() != ExitStatus::Success {
            self.end_line(screen.out);
            return Ok(());
        }
        self.finish(response.result.as_ref(), &text, screen)
    }

    /// Prints what remains of the result, whose text is `text`.
    pub fn finish(&self, result: Option<&Value>, text: &str, screen: &mut Screen<'_>) -> Result<(), PluginError> {
        if let Some(rest) = self.rest(result, text) {
            let is_open = self.has_open_line.swap(false, Ordering::Relaxed) || self.shown.ends_with('\n');
            if rest.is_empty() && !is_open {
                // A note has ended the line.
                return Ok(());
            }
            return screen.result(&format!("{}\n", self.printable(rest)));
        }
        let has_text = !self.call.0.is_empty();
        if has_text && !self.is_lost {
            self.end_line(screen.out);
            if !text.is_empty() {
                screen.note(WHOLE);
            }
        }
        screen.result(&format!("{}\n", self.printable(text)))
    }

    /// What follows the text on the screen; `None`: something else is there, or nothing.
    fn rest<'a>(&self, result: Option<&Value>, text: &'a str) -> Option<&'a str> {
        if self.is_lost || self.has_gap || self.shown.is_empty() {
            return None;
        }
        // A long result is shortened in the events.
        let is_shortened = || {
            let beginning = text.strip_suffix('…');
            beginning.is_some_and(|beginning| self.shown.starts_with(beginning))
        };
        // A result with a schema was printed as the model wrote it.
        let is_same_json = || {
            let shown = serde_json::from_str::<Value>(&self.shown).ok();
            result.is_some_and(|result| !result.is_string()) && shown.as_ref() == result
        };
        let rest = text.strip_prefix(self.shown.as_str());
        rest.or_else(|| (is_shortened() || is_same_json()).then_some(""))
    }

    /// What is to be printed for a fragment.
    fn advance(&mut self, fragment: &TextFragment) -> Option<String> {
        let call = fragment.call_of_all_attempts();
        if fragment.task != self.task || (call == self.call.0 && fragment.attempt < self.call.1) {
            return None;
        }
        let mut printed = String::new();
        let is_same_call = call == self.call.0;
        // The worker has restarted, and the answer that it was reading is not the one that comes now.
        let is_void = is_same_call && (fragment.attempt > self.call.1 || self.contradicts(fragment));
        if !is_same_call || is_void {
            if !self.shown.is_empty() {
                let note = if is_void { &*format!("[{VOID}]\n") } else { "" };
                let open = if self.shown.ends_with('\n') { "" } else { "\n" };
                printed = format!("{open}{note}");
            }
            self.call = (call.to_owned(), fragment.attempt);
            self.shown.clear();
            (self.end, self.has_gap) = (0, false);
        }
        if fragment.offset > self.end {
            printed.push_str(GAP);
            (self.end, self.has_gap) = (fragment.offset, true);
        }
        let known = usize::try_from(self.end - fragment.offset).unwrap_or(usize::MAX);
        let new = fragment.text.get(known..).unwrap_or_default();
        self.shown.push_str(new);
        self.end += new.len() as u64;
        printed.push_str(new);
        Some(printed).filter(|printed| !printed.is_empty())
    }

    /// Whether the fragment repeats another text than the one that was printed.
    fn contradicts(&self, fragment: &TextFragment) -> bool {
        let Ok(start) = usize::try_from(fragment.offset) else {
            return false;
        };
        if self.has_gap || fragment.offset >= self.end {
            return false;
        }
        let known = self.shown.get(start..);
        !known.is_some_and(|known| known.starts_with(&*fragment.text) || fragment.text.starts_with(known))
    }

    fn printable(&self, text: &str) -> String {
        if self.is_terminal {
            printable::lines(text)
        } else {
            text.to_owned()
        }
    }
}

/// Standard error beside text that arrives: what is written begins on a line of its own.
pub(super) struct NoteWriter<'a> {
    pub(super) err: &'a mut (dyn Write + Send),
    pub(super) has_open_line: &'a AtomicBool,
}

impl Write for NoteWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.has_open_line.swap(false, Ordering::Relaxed) {
            self.err.write_all(b"\n")?;
        }
        self.err.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.err.flush()
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn fragment(call: &str, offset: u64, text: &str) -> TextFragment {
        TextFragment {
            task: "request-a".into(),
            call: call.into(),
            attempt: call.rsplit_once('a').unwrap().1.parse().unwrap(),
            offset,
            text: text.into(),
        }
    }

    /// What is on the screen after these fragments, and after the end with this result: output and error.
    fn screen(fragments: &[TextFragment], result: &Value) -> (String, String, String) {
        let mut live = LiveText::new("a", true);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        for fragment in fragments {
            live.show(fragment, &mut out);
        }
        let before = String::from_utf8(out.clone()).unwrap();
        let mut screen = Screen {
            out: &mut out,
            err: &mut err,
        };
        let text = result.as_str().map_or_else(|| format!("{result:#}"), str::to_owned);
        live.finish(Some(result), &text, &mut screen).unwrap();
        let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).unwrap());
        (before, out, err)
    }

    fn on_screen(before: &str, after: &str) -> (String, String, String) {
        (before.into(), after.into(), String::new())
    }

    #[rstest]
    #[case::failed("Failed", json!(null), "")]
    #[case::limit("LimitReached", json!(null), "")]
    #[case::limit_with_a_result("LimitReached", json!("half"), "half\n")]
    #[case::empty("Completed", json!(""), "\n")]
    #[case::completed("Completed", json!("whole"), "whole\n")]
    fn a_task_that_failed_without_a_result_prints_nothing(
        #[case] outcome: &str,
        #[case] result: Value,
        #[case] printed: &str,
    ) {
        for is_terminal in [true, false] {
            let response = ReceivedTaskResponse {
                outcome: outcome.into(),
                result: Some(result.clone()).filter(|result| !result.is_null()),
                ..ReceivedTaskResponse::default()
            };
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let mut screen = Screen {
                out: &mut out,
                err: &mut err,
            };
            let live = LiveText::new("a", is_terminal);
            live.finish_response(&response, &mut screen).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), printed);
        }
    }

    #[test]
    fn a_failure_after_text_ends_the_line_of_that_text_and_no_other() {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut live = LiveText::new("a", true);
        live.show(&fragment("t1c1a1", 0, "All is"), &mut out);
        let response = ReceivedTaskResponse {
            outcome: "Failed".into(),
            ..ReceivedTaskResponse::default()
        };
        let mut screen = Screen {
            out: &mut out,
            err: &mut err,
        };
        live.finish_response(&response, &mut screen).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "All is\n");
    }

    #[test]
    fn text_is_printed_as_it_arrives_and_not_again_at_the_end() {
        let fragments = [fragment("t1c1a1", 0, "Hel"), fragment("t1c1a1", 3, "lo.")];
        let shown = screen(&fragments, &json!("Hello."));
        assert_eq!(shown, on_screen("Hello.", "Hello.\n"));
        let shown = screen(&fragments, &json!("Hello. Bye."));
        assert_eq!(shown, on_screen("Hello.", "Hello. Bye.\n"), "the end did not arrive");
        let shown = screen(&[], &json!("Hello."));
        assert_eq!(shown, on_screen("", "Hello.\n"), "nothing arrived");
    }

    #[test]
    fn text_of_other_tasks_is_not_printed() {
        let other = TextFragment {
            task: "request-ab".into(),
            ..fragment("t1c1a1", 0, "x")
        };
        assert_eq!(screen(&[other], &json!("y")), on_screen("", "y\n"));
    }

    #[test]
    fn a_gap_is_marked_and_the_response_printed_as_a_whole() {
        let fragments = [fragment("t1c1a1", 0, "a"), fragment("t1c1a1", 5, "f")];
        let (before, out, err) = screen(&fragments, &json!("abcdef"));
        assert_eq!(before, "a […] f");
        assert_eq!(out, "a […] f\nabcdef\n");
        assert_eq!(err, format!("{WHOLE}\n"));
        // The reader came late.
        let (before, ..) = screen(&[fragment("t1c1a1", 3, "d")], &json!("abcd"));
        assert_eq!(before, " […] d");
    }

    #[test]
    fn an_attempt_that_is_repeated_voids_its_text_and_a_late_fragment_of_it_is_ignored() {
        let fragments = [
            fragment("t1c1a1", 0, "wro"),
            fragment("t1c1a2", 0, "right"),
            fragment("t1c1a1", 3, "ng"),
        ];
        let shown = screen(&fragments, &json!("right"));
        let printed = format!("wro\n[{VOID}]\nright");
        assert_eq!(shown, on_screen(&printed, &format!("{printed}\n")));
    }

    #[test]
    fn text_that_a_restarted_worker_sends_again_is_skipped_and_other_text_voids_it() {
        let fragments = [
            fragment("t1c1a1", 0, "abc"),
            fragment("t1c1a1", 0, "ab"),
            fragment("t1c1a1", 2, "cde"),
        ];
        assert_eq!(screen(&fragments, &json!("abcde")), on_screen("abcde", "abcde\n"));
        let fragments = [fragment("t1c1a1", 0, "abc"), fragment("t1c1a1", 0, "xyz")];
        let printed = format!("abc\n[{VOID}]\nxyz");
        assert_eq!(
            screen(&fragments, &json!("xyz")),
            on_screen(&printed, &format!("{printed}\n"))
        );
    }

    #[test]
    fn the_text_of_each_call_begins_on_a_line_of_its_own() {
        let fragments = [fragment("t1c1a1", 0, "I look."), fragment("t1c2a1", 0, "Found.")];
        let shown = screen(&fragments, &json!("Found."));
        assert_eq!(shown, on_screen("I look.\nFound.", "I look.\nFound.\n"));
        let (_, out, err) = screen(&fragments[..1], &json!("Found."));
        assert_eq!((out.as_str(), err), ("I look.\nFound.\n", format!("{WHOLE}\n")));
    }

    #[test]
    fn a_result_that_is_json_or_was_shortened_is_not_printed_again() {
        let fragments = [fragment("t1c1a1", 0, "{\"a\":1}")];
        assert_eq!(
            screen(&fragments, &json!({"a": 1})),
            on_screen("{\"a\":1}", "{\"a\":1}\n")
        );
        let fragments = [fragment("t1c1a1", 0, "a long text")];
        assert_eq!(
            screen(&fragments, &json!("a long…")),
            on_screen("a long text", "a long text\n")
        );
    }

    #[test]
    fn control_characters_are_replaced_on_a_terminal_only() {
        for (is_terminal, expected) in [(true, "a [2J"), (false, "a\u{1b}[2J")] {
            let mut live = LiveText::new("a", is_terminal);
            let mut out = Vec::new();
            live.show(&fragment("t1c1a1", 0, "a\u{1b}[2J"), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn a_note_begins_on_a_line_of_its_own_and_the_line_is_ended_once() {
        let mut live = LiveText::new("a", true);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        live.show(&fragment("t1c1a1", 0, "I look."), &mut out);
        let has_open_line = Arc::clone(&live.has_open_line);
        let mut notes = NoteWriter {
            err: &mut err,
            has_open_line: &has_open_line,
        };
        for line in ["runs x", "ran x"] {
            writeln!(notes, "{line}").unwrap();
        }
        live.end_line(&mut out);
        let mut screen = Screen {
            out: &mut out,
            err: &mut err,
        };
        live.finish(Some(&json!("I look.")), "I look.", &mut screen).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "I look.");
        assert_eq!(String::from_utf8(err).unwrap(), "\nruns x\nran x\n");
    }

    #[test]
    fn after_output_that_could_not_be_written_the_end_is_an_error() {
        struct FullDisk;
        impl Write for FullDisk {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut live = LiveText::new("a", false);
        live.show(&fragment("t1c1a1", 0, "x"), &mut FullDisk);
        let mut screen = Screen {
            out: &mut FullDisk,
            err: &mut Vec::new(),
        };
        assert!(live.finish(Some(&json!("x")), "x", &mut screen).is_err());
        let mut out = Vec::new();
        screen.out = &mut out;
        live.finish(Some(&json!("x")), "x", &mut screen).unwrap();
        assert_eq!(out, b"x\n", "all of it");
    }
}
