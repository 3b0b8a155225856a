//! Errors of the Kubernetes client as texts for users: what failed and where, never a value.
//!
//! The messages of the client show lines of the kubeconfig, the environment of a credential command, and what the
//! command printed: tokens. So they are mapped by kind.

use std::error::Error;
use std::io;
use std::path::Path;

use kube::Config;
use kube::client::AuthError;
use kube::config::{KubeconfigError, LoadDataError};
use kube::core::Status;

use super::api_requests::UnansweredRequest;
use crate::support::text::{first_chars, with_ellipsis};

/// What the client sets as the reason of a response that is no status of the API.
const UNPARSED: &str = "Failed to parse error data";
/// The fix if there is no kubeconfig.
const SET_KUBECONFIG: &str = "set --kubeconfig or KUBECONFIG";

/// Maximum number of characters that are shown of what a server answers that may be no API server.
const MAX_ANSWER: usize = 200;

/// Why a request to the API server failed.
#[must_use]
pub fn problem(error: &kube::Error) -> String {
    let kube::Error::Api(status) = error else {
        return cause(error, None);
    };
    if status.code == 401 {
        return format!(
            "the API server rejects the credentials ({}): they are wrong or have expired. Log in again, or name another \
             --context or --kubeconfig",
            answer(status)
        );
    }
    if is_of_api(status) && !status.message.is_empty() {
        return status.message.clone();
    }
    format!("the server answered with {}", answer(status))
}

/// A status with the first line of its message: it may be a page of a proxy.
#[must_use]
pub fn answer(status: &Status) -> String {
    let line = status.message.lines().next().unwrap_or_default().trim();
    let colon = if line.is_empty() { "" } else { ": " };
    let line = with_ellipsis(first_chars(line, MAX_ANSWER), line);
    format!("status {}{colon}{line}", status.code)
}

/// Whether an answer is one of the API, as opposed to that of a path that does not exist, or of a proxy.
#[must_use]
pub fn is_of_api(status: &Status) -> bool {
    status.reason != UNPARSED
}

/// The innermost error of a chain, without values. `config`: whose credential command is named.
#[must_use]
pub fn cause(error: &(dyn Error + 'static), config: Option<&Config>) -> String {
    let mut cause = error;
    loop {
        if let Some(error) = cause.downcast_ref::<UnansweredRequest>() {
            return error.problem();
        }
        if let Some(error) = cause.downcast_ref::<AuthError>() {
            return authentication(error, config);
        }
        if let Some(error) = cause.downcast_ref::<KubeconfigError>() {
            return kubeconfig(error, "the kubeconfig");
        }
        if let Some(error) = cause.downcast_ref::<serde_json::Error>() {
            return format!(
                "the response of the API server cannot be read (line {}, column {})",
                error.line(),
                error.column()
            );
        }
        if let Some(error) = cause.downcast_ref::<rustls::Error>() {
            return tls(error);
        }
        match inner(cause) {
            Some(inner) => cause = inner,
            None => {
                return cause
                    .downcast_ref::<io::Error>()
                    .map_or_else(|| cause.to_string(), of_system);
            }
        }
    }
}

/// Whether an error is one of the credentials: no request was sent.
#[must_use]
pub fn is_of_credentials(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| inner(*error)).any(<dyn Error>::is::<AuthError>)
}

/// The error within another. One of input or output passes over the error that it wraps: it returns the source of that.
fn inner<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(wrapped) => Some(wrapped),
        None => error.source(),
    }
}

/// An error of the operating system as a part of a sentence, without its number.
fn of_system(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or_default();
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// Why there is no TLS connection.
fn tls(error: &rustls::Error) -> String {
    let problem = if matches!(error, rustls::Error::InvalidMessage(_)) {
        "the server does not speak TLS on this port".to_owned()
    } else if *error == rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer) {
        "the certificate of the server is not from the certificate authority of the kubeconfig".to_owned()
    } else {
        error.to_string()
    };
    format!("the TLS connection failed: {problem}")
}

/// Why there are no credentials.
#[must_use]
pub fn authentication(error: &AuthError, config: Option<&Config>) -> String {
    let command = config
        .and_then(|config| config.auth_info.exec.as_ref()?.command.as_deref())
        .and_then(|command| Path::new(command).file_name()?.to_str())
        .map_or_else(
            || "the credential command of the kubeconfig".to_owned(),
            |program| format!("the credential command {program}"),
        );
    match error {
        AuthError::InvalidBasicAuth(_) => "the user name or password has characters that a header cannot have".into(),
        AuthError::InvalidBearerToken(_) => "the token has characters that a header cannot have".into(),
        AuthError::ExecPluginFailed | AuthError::UnrefreshableTokenResponse => {
            format!("{command} returned no credentials")
        }
        AuthError::MalformedTokenExpirationDate(_) => "the token has an expiry that is not a time".into(),
        AuthError::AuthExecStart(error) => format!("{command} cannot be started: {}", error.kind()),
        AuthError::AuthExecRun { out, .. } => format!("{command} failed: {}", out.status),
        AuthError::AuthExecParse(error) => match error.location() {
            Some(at) => format!(
                "{command} did not print a valid ExecCredential (line {}, column {})",
                at.line(),
                at.column()
            ),
            None => format!("{command} did not print a valid ExecCredential"),
        },
        AuthError::AuthExecSerialize(_) | AuthError::AuthExec(_) => format!("{command} cannot be run"),
        AuthError::ReadTokenFile(error, path) => {
            format!("the token file {} cannot be read: {}", path.display(), error.kind())
        }
        AuthError::ParseTokenKey(_) => format!("{command} did not print valid JSON"),
        AuthError::MissingCommand => "the kubeconfig names no credential command".into(),
        AuthError::ExecMissingClusterInfo => format!("{command} needs cluster information, which is missing"),
        AuthError::NoValidNativeRootCA(_) => "the system has no valid root certificates".into(),
    }
}

/// Why a kubeconfig cannot be used. `file`: its path, for parts that have none of their own.
#[must_use]
pub fn kubeconfig(error: &KubeconfigError, file: &str) -> String {
    match error {
        KubeconfigError::CurrentContextNotSet => format!("{file} sets no current context; name one with --context"),
        KubeconfigError::KindMismatch => "files of different kinds cannot be merged".into(),
        KubeconfigError::ApiVersionMismatch => "files of different API versions cannot be merged".into(),
        KubeconfigError::LoadContext(name) => format!("context {name} was not found in {file}"),
        KubeconfigError::LoadClusterOfContext(name) => format!("cluster {name} of the context was not found in {file}"),
        KubeconfigError::FindPath => format!("there is no home directory; {SET_KUBECONFIG}"),
        KubeconfigError::ReadConfig(error, path) if error.kind() == io::ErrorKind::NotFound => {
            format!("{} does not exist; {SET_KUBECONFIG}", path.display())
        }
        KubeconfigError::ReadConfig(error, path) => format!("{} cannot be read: {}", path.display(), error.kind()),
        KubeconfigError::Parse(error) => match error.location() {
            Some(at) => format!(
                "{file} is not a valid kubeconfig (line {}, column {})",
                at.line(),
                at.column()
            ),
            None => format!("{file} is not a valid kubeconfig"),
        },
        KubeconfigError::MissingClusterUrl => format!("the cluster in {file} has no server"),
        KubeconfigError::ParseClusterUrl(_) => format!("the server in {file} is not a valid URL"),
        KubeconfigError::ParseProxyUrl(_) => format!("the proxy-url in {file} is not a valid URL"),
        KubeconfigError::LoadCertificateAuthority(error) => data("certificate authority", error, file),
        KubeconfigError::LoadClientCertificate(error) => data("client certificate", error, file),
        KubeconfigError::LoadClientKey(error) => data("client key", error, file),
        KubeconfigError::ParseCertificates(_) => format!("the certificates in {file} are not valid PEM"),
        KubeconfigError::ParseNoProxy(_) => "the environment variable NO_PROXY is not valid".into(),
    }
}

fn data(what: &str, error: &LoadDataError, file: &str) -> String {
    match error {
        LoadDataError::DecodeBase64(_) => format!("the {what} in {file} is not valid base64"),
        LoadDataError::ReadFile(error, path) => {
            format!("the {what} {} cannot be read: {}", path.display(), error.kind())
        }
        LoadDataError::NoBase64DataOrFile => format!("the {what} in {file} is empty"),
    }
}

#[cfg(test)]
mod tests {
    use kube::client::ConfigExt;
    use kube::config::Kubeconfig;
    use serde_json::json;

    use super::*;
    use crate::plugin::failure::PluginError;

    const CANARY: &str = "canary-7f3a";

    fn exec_failure(script: &str) -> (Config, AuthError) {
        let mut config = Config::new(axum::http::Uri::from_static("https://example.com"));
        config.auth_info = serde_json::from_value(json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/sh", "args": ["-c", script],
            "env": [{"name": "SECRET", "value": CANARY}], "interactiveMode": "Never",
        }}))
        .unwrap();
        let Err(kube::Error::Auth(failure)) = config.auth_layer() else {
            panic!("the command succeeded");
        };
        (config, failure)
    }

    #[test]
    fn a_credential_command_is_reported_without_its_environment_and_output() {
        for (script, expected) in [
            ("echo $SECRET; echo $SECRET >&2; exit 3", "exit status: 3"),
            (
                "echo '{\"kind\": \"ExecCredential\", \"status\": {\"token\": [\"'$SECRET'\"]}}'",
                "did not print a valid ExecCredential",
            ),
        ] {
            let (config, failure) = exec_failure(script);
            assert!(
                failure.to_string().contains(CANARY),
                "the test shows nothing: {failure}"
            );
            let text = authentication(&failure, Some(&config));
            assert!(text.contains("command sh ") && text.contains(expected), "{text}");
            assert!(!text.contains(CANARY), "{text}");
            let wrapped = kube::Error::Service(Box::new(failure));
            let text = PluginError::cluster("list agents", &wrapped).to_string();
            assert!(text.contains(expected) && !text.contains(CANARY), "{text}");
            let text = PluginError::cluster("list agents", &kube::Error::Auth(exec_failure(script).1)).to_string();
            assert!(text.contains(expected) && !text.contains(CANARY), "{text}");
        }
    }

    #[test]
    fn errors_of_connections_are_parts_of_a_sentence() {
        use rustls::{CertificateError, InvalidMessage};
        let refused = io::Error::from_raw_os_error(111);
        let wrapped = |error: rustls::Error| io::Error::other(error);
        for (error, expected) in [
            (refused, "connection refused"),
            (io::Error::other("dead"), "dead"),
            (
                wrapped(InvalidMessage::InvalidContentType.into()),
                "the TLS connection failed: the server does not speak TLS on this port",
            ),
            (
                wrapped(CertificateError::UnknownIssuer.into()),
                "the TLS connection failed: the certificate of the server is not from the certificate authority of the \
                 kubeconfig",
            ),
            (
                wrapped(CertificateError::NotValidForName.into()),
                "the TLS connection failed: invalid peer certificate: NotValidForName",
            ),
        ] {
            assert_eq!(cause(&error, None), expected);
        }
    }

    #[test]
    fn a_kubeconfig_that_is_not_valid_is_reported_without_its_lines() {
        let text = format!("apiVersion: v1\nkind: Config\nusers:\n- name: ann\n  user:\n    token: [{CANARY}]\n");
        let failure = Kubeconfig::from_yaml(&text).unwrap_err();
        assert!(
            failure.to_string().contains(CANARY),
            "the test shows nothing: {failure}"
        );
        let text = kubeconfig(&failure, "/home/ann/config");
        assert!(text.starts_with("/home/ann/config is not a valid kubeconfig"), "{text}");
        assert!(!text.contains(CANARY), "{text}");
    }

    #[test]
    fn a_response_that_is_not_readable_is_reported_without_its_values() {
        let failure = serde_json::from_str::<u32>(&format!("\"{CANARY}\"")).unwrap_err();
        let text = problem(&kube::Error::SerdeError(failure));
        assert!(text.contains("line 1") && !text.contains(CANARY), "{text}");
    }
}
