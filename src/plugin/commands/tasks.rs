//! Commands that give an Agent tasks: run, chat.

use std::io::{self, BufRead, IsTerminal, Read};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::api::{Agent, NamespacedName};
use crate::plugin::arguments::{ChatArgs, RunArgs};
use crate::plugin::failure::{ExitStatus, PluginError};
use crate::plugin::link::{LinkFailure, TaskSubmission, UserLink};
use crate::plugin::session::{PluginSession, Screen};
use crate::plugin::tasks::task_run::Interrupt;
use crate::plugin::tasks::{Conversation, LiveText, TaskEnd, TaskRun};
use crate::support::random::random_hex;

/// Bytes of a random id.
const ID_BYTES: usize = 12;
/// The prompt for the next message of the user.
const PROMPT: &str = "> ";

pub(super) async fn run(
    session: &PluginSession,
    arguments: RunArgs,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    let agent = session.named(&arguments.name);
    // What is refused is refused before a user types.
    let link = UserLink::open(session, &agent.namespace).await?;
    let prompt = if arguments.prompt == "-" {
        standard_input()?
    } else {
        arguments.prompt
    };
    let task = TaskSubmission {
        prompt,
        id: arguments.id.map_or_else(random_id, Ok)?,
        untrusted_content: None,
    };
    let run = TaskRun::new(&link, &agent, &task, arguments.verbose);
    let mut live = session
        .streams_text(arguments.stream)
        .then(|| LiveText::new(&task.id, session.is_terminal));
    let mut interrupt = std::pin::pin!(interrupted());
    match run.run(screen, live.as_mut(), interrupt.as_mut()).await {
        Ok(TaskEnd::Response(response)) => {
            let printed = match session.print_data(&response, screen) {
                Err(PluginError::Stream(error)) if error.kind() == io::ErrorKind::BrokenPipe => true,
                printed => printed?,
            };
            if !printed {
                // Byte for byte for programs.
                let live = live.unwrap_or_else(|| LiveText::new(&task.id, session.is_terminal));
                live.finish_response(&response, screen)?;
            }
            if let Some(problem) = response.problem() {
                screen.note(&format!("error: {problem}"));
            }
            Ok(response.exit_status())
        }
        Ok(TaskEnd::Forgotten { id }) => {
            let agent = session.agent(&arguments.name).await?;
            Err(PluginError::Refused(forgotten(&id, &agent)))
        }
        Ok(TaskEnd::Interrupted) => {
            if !run.was_requested() {
                return Err(PluginError::Refused("interrupted before the task was requested".into()));
            }
            screen.note(&continues(&agent, &task));
            Ok(ExitStatus::OutcomeUnknown)
        }
        Err(error) => {
            if is_outcome_unknown(&error, run.was_received()) {
                screen.note(&format!("error: {error}"));
                screen.note(&continues(&agent, &task));
                return Ok(ExitStatus::OutcomeUnknown);
            }
            if run.was_requested() && !was_refused(&error) {
                screen.note(&continues(&agent, &task));
            }
            Err(error)
        }
    }
}

/// What is still known of a task whose events are gone: how it ended, if it is among the last ones.
fn forgotten(id: &str, agent: &Agent) -> String {
    let recent = agent.status.iter().flat_map(|status| &status.recent_activations);
    let known = recent.into_iter().find(|activation| activation.id == *id).map_or_else(
        || "it has ended, or waits behind others".to_owned(),
        |activation| {
            let reason = activation
                .reason
                .map(|reason| format!(" ({reason})"))
                .unwrap_or_default();
            format!(
                "it has ended: {}{reason} at {}",
                activation.outcome, activation.completed_at.0
            )
        },
    );
    format!(
        "{id} was requested before, and its events are no longer kept, so its result cannot be read: {known}. Use another --id \
         to request it again"
    )
}

/// Whether an accepted task continues although its end could not be read. Its events may also be gone, which is final.
fn is_outcome_unknown(error: &PluginError, was_received: bool) -> bool {
    was_received && matches!(error, PluginError::Link(_))
}

/// The controller has said that it does not accept the task.
fn was_refused(error: &PluginError) -> bool {
    matches!(error, PluginError::Link(LinkFailure::Refused { status, .. }) if *status != 503)
}

fn continues(agent: &NamespacedName, task: &TaskSubmission) -> String {
    let NamespacedName { namespace, name } = agent;
    format!(
        "a task that was accepted continues; to wait for its result: kubectl agentloop run -n {namespace} {name} --id {} with the \
         same prompt",
        task.id
    )
}

fn standard_input() -> Result<String, PluginError> {
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text)?;
    Ok(text)
}

/// The end of the wait, by Ctrl-C. From now on, and not only once it is awaited, an interrupt does not end the process.
fn interrupted() -> impl Future<Output = ()> + Send {
    let interrupts = signal(SignalKind::interrupt());
    async {
        match interrupts {
            Ok(mut interrupts) => {
                let _ = interrupts.recv().await;
            }
            // Without a handler the process ends, as by default.
            Err(_) => std::future::pending().await,
        }
    }
}

fn random_id() -> Result<String, PluginError> {
    Ok(format!("kubectl-{}", random_digits::<ID_BYTES>()?))
}

/// The hexadecimal digits of this many random bytes.
pub(super) fn random_digits<const BYTES: usize>() -> Result<String, PluginError> {
    random_hex::<BYTES>().ok_or_else(|| PluginError::Refused("the system has no random numbers".into()))
}

pub(super) async fn chat(
    session: &PluginSession,
    arguments: &ChatArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let asks = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let mut interrupt = std::pin::pin!(interrupted());
    converse(session, arguments, (lines(), asks), interrupt.as_mut(), screen).await
}

/// The lines of standard input. They are read by a thread of their own, which ends with the process: a read of a
/// terminal cannot be cancelled.
fn lines() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Reads messages until the input ends, or the user interrupts.
async fn converse(
    session: &PluginSession,
    arguments: &ChatArgs,
    (mut lines, asks): (mpsc::Receiver<io::Result<String>>, bool),
    mut interrupt: Interrupt<'_>,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let agent = session.named(&arguments.name);
    let link = UserLink::open(session, &agent.namespace).await?;
    let mut conversation = Conversation::default();
    loop {
        if asks {
            screen.result(PROMPT)?;
            let _ = screen.out.flush();
        }
        let typed = tokio::select! {
            typed = lines.recv() => typed,
            () = interrupt.as_mut() => None,
        };
        let Some(typed) = typed.transpose()? else { return Ok(()) };
        let message = typed.trim();
        if message.is_empty() {
            continue;
        }
        let (prompt, untrusted_content) = match conversation.prompt(message) {
            Ok(prompt) => prompt,
            Err(problem) => {
                screen.note(&format!("error: {problem}"));
                continue;
            }
        };
        let task = TaskSubmission {
            prompt,
            id: random_id()?,
            untrusted_content,
        };
        let run = TaskRun::new(&link, &agent, &task, arguments.verbose);
        let mut live = LiveText::new(&task.id, true);
        let streamed = session.streams_text(arguments.stream).then_some(&mut live);
        let ended = run.run(screen, streamed, interrupt.as_mut()).await;
        let is_left = match &ended {
            Ok(end) => *end == TaskEnd::Interrupted,
            Err(error) => run.was_received() || !was_refused(error),
        };
        if is_left && run.was_requested() {
            screen.note(&format!(
                "the agent continues with the last message if it has received it, as task {}",
                task.id
            ));
        }
        match ended? {
            TaskEnd::Interrupted => return Ok(()),
            TaskEnd::Forgotten { id } => screen.note(&format!(
                "error: {}",
                forgotten(&id, &session.agent(&arguments.name).await?)
            )),
            TaskEnd::Response(response) => {
                let text = response.result_text();
                if let Some(problem) = response.problem() {
                    live.end_line(screen.out);
                    screen.note(&format!("error: {problem}"));
                }
                if text.is_empty() {
                    live.end_line(screen.out);
                } else {
                    live.finish(response.result.as_ref(), &text, screen)?;
                    let source = response.untrusted_content.or(task.untrusted_content);
                    conversation.add(message, &text, source.as_deref());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_receipt_a_failed_connection_leaves_the_outcome_unknown() {
        let refused = || {
            PluginError::Link(LinkFailure::Refused {
                status: 403,
                message: String::new(),
            })
        };
        assert!(is_outcome_unknown(&refused(), true));
        assert!(is_outcome_unknown(&LinkFailure::Unreadable(String::new()).into(), true));
        assert!(!is_outcome_unknown(&refused(), false));
        assert!(!is_outcome_unknown(
            &PluginError::Refused("no longer kept".into()),
            true
        ));
    }
}
