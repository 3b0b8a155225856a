//! Commands that give an Agent tasks: run, chat.

use std::io::{self, BufRead, IsTerminal, Read};

use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::mpsc;

use crate::plugin::arguments::{ChatArgs, RunArgs};
use crate::plugin::failure::{ExitStatus, PluginError};
use crate::plugin::link::{LinkFailure, TaskSubmission, UserLink};
use crate::plugin::screens::printable;
use crate::plugin::session::{PluginSession, Screen};
use crate::plugin::tasks::task_run::Interrupt;
use crate::plugin::tasks::{Conversation, TaskEnd, TaskRun};

/// Bytes of a random id.
const ID_BYTES: usize = 12;
/// What asks for the next message.
const PROMPT: &[u8] = b"> ";

pub(super) async fn run(
    session: &PluginSession,
    arguments: RunArgs,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    let prompt = if arguments.prompt == "-" {
        standard_input()?
    } else {
        arguments.prompt
    };
    let task = TaskSubmission {
        prompt,
        id: arguments.id.map_or_else(random_id, Ok)?,
    };
    let agent = session.named(&arguments.name);
    let link = UserLink::open(session, &agent.namespace).await?;
    let run = TaskRun::new(&link, &agent, &task, arguments.verbose);
    let mut interrupt = std::pin::pin!(interrupted());
    match run.run(screen.err, interrupt.as_mut()).await {
        Ok(TaskEnd::Response(response)) => {
            if !session.print_data(&response, screen)? {
                let text = response.result_text();
                // Byte for byte for programs.
                let text = if io::stdout().is_terminal() {
                    printable::lines(&text)
                } else {
                    text
                };
                writeln!(screen.out, "{text}")?;
            }
            if let Some(problem) = response.problem() {
                writeln!(screen.err, "error: {problem}")?;
            }
            Ok(response.exit_status())
        }
        Ok(TaskEnd::Interrupted) => {
            writeln!(screen.err, "{}", continues(&arguments.name, &task))?;
            Ok(ExitStatus::OutcomeUnknown)
        }
        Err(error) => {
            if run.was_requested() && !was_refused(&error) {
                writeln!(screen.err, "{}", continues(&arguments.name, &task))?;
            }
            Err(error)
        }
    }
}

/// The controller has said that it does not accept the task.
fn was_refused(error: &PluginError) -> bool {
    matches!(error, PluginError::Link(LinkFailure::Refused { status, .. }) if *status != 503)
}

fn continues(name: &str, task: &TaskSubmission) -> String {
    format!(
        "a task that was accepted continues; to wait for its result: kubectl agentloop run {name} --id {} with the same prompt",
        task.id
    )
}

fn standard_input() -> Result<String, PluginError> {
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text)?;
    Ok(text)
}

/// The end of the wait, by Ctrl-C.
async fn interrupted() {
    // Without a handler the process ends, as by default.
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn random_id() -> Result<String, PluginError> {
    let mut bytes = [0_u8; ID_BYTES];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| PluginError::Refused("the system has no random numbers".into()))?;
    Ok(format!(
        "kubectl-{:024x}",
        bytes.iter().fold(0_u128, |id, byte| (id << 8) | u128::from(*byte))
    ))
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
            screen.out.write_all(PROMPT)?;
            screen.out.flush()?;
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
        let prompt = match conversation.prompt(message) {
            Ok(prompt) => prompt,
            Err(problem) => {
                writeln!(screen.err, "error: {problem}")?;
                continue;
            }
        };
        let task = TaskSubmission {
            prompt,
            id: random_id()?,
        };
        let run = TaskRun::new(&link, &agent, &task, arguments.verbose);
        match run.run(screen.err, interrupt.as_mut()).await? {
            TaskEnd::Interrupted => {
                writeln!(
                    screen.err,
                    "the agent continues with the last message, as task {}",
                    task.id
                )?;
                return Ok(());
            }
            TaskEnd::Response(response) => {
                if let Some(problem) = response.problem() {
                    writeln!(screen.err, "error: {problem}")?;
                }
                let text = response.result_text();
                if !text.is_empty() {
                    writeln!(screen.out, "{}", printable::lines(&text))?;
                    conversation.add(message, &text);
                }
            }
        }
    }
}
