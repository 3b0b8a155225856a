//! Reads the history of an Agent that runs: `agentloop journal` in its pod copies the journal, as a user can with
//! `kubectl exec`.
//!
//! Owns the command in the pod and the bounds of what is read. The copy has prompts and answers, so it stays in memory. How a
//! history is read from it is not known here: the caller of the plugin passes a [`JournalExport`].

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Api;
use kube::api::AttachParams;
use kube::client::UpgradeConnectionError;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

use super::cluster_errors;
use super::failure::PluginError;
use super::session::PluginSession;
use crate::link::pod::{BINARY, WORKER_CONTAINER};

/// Makes the JSON lines of `agentloop history` from a copy of a journal; the text is the name of the copy in errors.
pub type JournalExport = fn(&[u8], &str) -> Result<String, String>;

/// Maximum number of bytes of a copy: several times what a journal keeps of texts.
const MAX_BYTES: usize = 512 << 20;
/// Maximum number of bytes of the errors of the command that are shown.
const MAX_ERROR_BYTES: usize = 2_048;
/// Longest silence of the command, which waits for no one.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the command is run until it succeeds: it fails while the worker cleans up the journal.
const ATTEMPTS: u32 = 4;
/// Size of the buffer between the connection and its reader.
const BUFFER: usize = 1 << 16;

/// The history of an Agent as JSON lines.
pub(super) async fn history(session: &PluginSession, agent: &str) -> Result<String, PluginError> {
    // Says whether there is such an Agent; a pod may only be missing.
    session.agent(agent).await?;
    let pods = Api::namespaced(session.client.clone(), &session.namespace);
    let mut failed = String::new();
    for _ in 0..ATTEMPTS {
        match copy(&pods, agent, &session.namespace).await? {
            Ok(bytes) => {
                return (session.export)(&bytes, &format!("journal.sqlite of Agent {agent}"))
                    .map_err(PluginError::Refused);
            }
            Err(problem) => failed = problem,
        }
    }
    Err(PluginError::Refused(format!(
        "cannot copy the journal in pod {agent} of namespace {}: {failed}",
        session.namespace
    )))
}

/// Runs the command once. The inner error is that of the command, which may succeed the next time.
async fn copy(pods: &Api<Pod>, pod: &str, namespace: &str) -> Result<Result<Vec<u8>, String>, PluginError> {
    let silent = || {
        PluginError::Refused(format!(
            "pod {pod} of namespace {namespace} has not answered for {READ_TIMEOUT:?}"
        ))
    };
    let parameters = AttachParams::default()
        .container(WORKER_CONTAINER)
        .max_stdout_buf_size(BUFFER);
    let started = timeout(READ_TIMEOUT, pods.exec(pod, [BINARY, "journal"], &parameters)).await;
    let started = started.map_err(|_| silent())?;
    let mut process = started.map_err(|error| refused(&error, pod, namespace))?;
    let (Some(mut out), Some(mut err), Some(status)) = (process.stdout(), process.stderr(), process.take_status())
    else {
        return Ok(Err("the connection has no output".into()));
    };
    // Both at once: the connection stands still while one of them is not read.
    let reading = async {
        let errors = async { Ok(read_some(&mut err).await) };
        tokio::try_join!(read(&mut out, MAX_BYTES), errors)
    };
    tokio::pin!(reading, status);
    let (output, status) = tokio::select! {
        // A connection that is lost has no status, and its output no end.
        status = &mut status => match status {
            Some(status) => (reading.await, Some(status)),
            None => return Ok(Err("the connection was lost".into())),
        },
        output = &mut reading => (output, timeout(READ_TIMEOUT, status).await.ok().flatten()),
    };
    match output {
        Ok((bytes, err)) => Ok(outcome(status, &err).and_then(|()| match bytes.as_slice() {
            [] => Err("the copy is empty".into()),
            _ => Ok(bytes),
        })),
        Err(ReadProblem::Silent) => Err(silent()),
        Err(ReadProblem::TooLong) => Err(PluginError::Refused(format!(
            "the journal of Agent {pod} has more than {} MiB: copy it with kubectl exec, and use --file",
            MAX_BYTES >> 20
        ))),
        Err(ReadProblem::Lost(error)) => Ok(Err(format!("the connection was lost ({})", error.kind()))),
    }
}

/// How the command ended, with what it wrote to standard error.
fn outcome(status: Option<Status>, err: &str) -> Result<(), String> {
    match status {
        Some(status) if status.status.as_deref() == Some("Success") => Ok(()),
        Some(status) if err.is_empty() => Err(status.message.unwrap_or_default()),
        Some(_) => Err(err.to_owned()),
        None => Err("the connection was lost".into()),
    }
}

fn refused(error: &kube::Error, pod: &str, namespace: &str) -> PluginError {
    let code = if let kube::Error::Api(status) = error {
        status.code
    } else if let kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) = error {
        status.as_u16()
    } else {
        0
    };
    match code {
        404 => PluginError::Refused(format!(
            "Agent {pod} has no pod in namespace {namespace} now, so its journal cannot be read: resume or wake it, or use --file"
        )),
        403 => PluginError::Refused(format!(
            "you may not run commands in pod {pod} of namespace {namespace}: this needs the verbs get and create on pods/exec there, \
             since a journal contains prompts and answers"
        )),
        400 | 500 => PluginError::Refused(format!(
            "container {WORKER_CONTAINER} of pod {pod} in namespace {namespace} accepts no command now (status {code}): try again \
             when it runs, or use --file"
        )),
        _ => PluginError::Refused(format!(
            "cannot run a command in pod {pod} of namespace {namespace}: {}",
            cluster_errors::problem(error)
        )),
    }
}

/// Why output was not read to its end.
#[derive(Debug)]
enum ReadProblem {
    Silent,
    TooLong,
    Lost(std::io::Error),
}

/// All that comes, if it is at most this long.
async fn read(from: &mut (impl AsyncRead + Unpin), max: usize) -> Result<Vec<u8>, ReadProblem> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; BUFFER];
    loop {
        let length = timeout(READ_TIMEOUT, from.read(&mut chunk)).await;
        let length = length.map_err(|_| ReadProblem::Silent)?.map_err(ReadProblem::Lost)?;
        if length == 0 {
            return Ok(bytes);
        }
        if bytes.len() + length > max {
            return Err(ReadProblem::TooLong);
        }
        bytes.extend_from_slice(&chunk[..length]);
    }
}

/// The beginning of what comes; the rest is read and left out.
async fn read_some(from: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0; 512];
    while let Ok(length @ 1..) = from.read(&mut chunk).await {
        let remaining = MAX_ERROR_BYTES.saturating_sub(bytes.len());
        bytes.extend_from_slice(&chunk[..length.min(remaining)]);
    }
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_is_read_up_to_its_bound_and_errors_are_shortened() {
        let whole = vec![7; 3 * BUFFER];
        let read = async |max| read(&mut whole.as_slice(), max).await;
        assert_eq!(read(whole.len()).await.unwrap(), whole);
        assert!(matches!(read(whole.len() - 1).await, Err(ReadProblem::TooLong)));
        for (length, shown) in [
            (MAX_ERROR_BYTES, MAX_ERROR_BYTES),
            (MAX_ERROR_BYTES + 1, MAX_ERROR_BYTES),
        ] {
            let text = "x".repeat(length);
            assert_eq!(read_some(&mut text.as_bytes()).await.len(), shown);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_command_times_out() {
        let (mut near, _far) = tokio::io::duplex(1);
        assert!(matches!(read(&mut near, 1).await, Err(ReadProblem::Silent)));
    }
}
