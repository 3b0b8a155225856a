//! What a command works with: a client of the API server, the namespace, the clock, and where output goes.

use std::ffi::OsStr;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::Arc;

use jiff::Timestamp;
use kube::api::ListParams;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower::buffer::BufferLayer;
use tower::retry::RetryLayer;

use crate::api::{Agent, AgentBudget, NamespacedName};

use super::api_requests::{LimitRequests, ServerAddress};
use super::arguments::{ConnectionArgs, OutputFormat};
use super::cluster_errors;
use super::failure::{PluginError, is_forbidden, is_not_found, is_of_unknown_path};
use super::impersonation;
use super::journal_copy::JournalExport;
use super::link::{LinkRoute, UserToken};
use super::retries::FollowRetryAfter;
use super::screens::printable;

/// Maximum number of requests that wait for the client.
const MAX_REQUESTS: usize = 16;

/// The clock.
pub type PluginClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// What a command works with.
pub struct PluginSession {
    /// Client of the API server, with the rights of the user, or of the one that is impersonated.
    pub client: Client,
    /// The user that requests to the API server impersonate.
    pub impersonated_user: Option<String>,
    /// The API server.
    pub address: ServerAddress,
    /// Namespace of the command.
    pub namespace: String,
    /// Whether lists are of all namespaces.
    pub all_namespaces: bool,
    /// Format of the output.
    pub format: Option<OutputFormat>,
    /// Namespace of the controller.
    pub controller_namespace: String,
    /// How the controller is reached.
    pub route: LinkRoute,
    /// Whose requests the controller receives.
    pub token: UserToken,
    /// The clock.
    pub clock: PluginClock,
    /// How histories are read from copies of journals.
    pub export: JournalExport,
    /// Whether a person reads the results on a terminal, as opposed to a program or a file.
    pub is_terminal: bool,
}

/// Where output goes.
pub struct Screen<'a> {
    /// Results.
    pub out: &'a mut (dyn Write + Send),
    /// Notes and warnings, printed apart from the results.
    pub err: &'a mut (dyn Write + Send),
}

impl Screen<'_> {
    /// Writes the result of work that is done, which a reader that is gone does not undo.
    pub fn result(&mut self, text: &str) -> Result<(), PluginError> {
        match self.out.write_all(text.as_bytes()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Writes a line beside the results. It may be lost: what is done does not depend on it.
    pub fn note(&mut self, text: &str) {
        note(self.err, text);
    }
}

/// Writes a line to standard error, which may be lost.
pub(super) fn note(err: &mut (dyn Write + Send), text: &str) {
    let _ = writeln!(err, "{}", printable::lines(text));
}

impl PluginSession {
    /// A session with the kubeconfig and the context that the flags name.
    pub(super) async fn connect(flags: &ConnectionArgs, export: JournalExport) -> Result<Self, PluginError> {
        let (mut config, context) = config(flags).await?;
        let impersonated_user = impersonation::apply(&flags.impersonation, &mut config)?;
        // The time for the connection is within that of the request.
        config.connect_timeout = None;
        // It repeats requests that fail at once elsewhere, and hides why until the time limit.
        config.default_retry = false;
        let address = ServerAddress::new(&config, context);
        let limit = LimitRequests::new(address.clone(), flags.request_timeout);
        let client = ClientBuilder::try_from(config.clone())
            .map_err(|error| PluginError::Kubeconfig(cluster_errors::cause(&error, Some(&config))))?;
        let session = Self {
            client: client
                .with_layer(&BufferLayer::new(MAX_REQUESTS))
                .with_layer(&RetryLayer::new(FollowRetryAfter::default()))
                .with_layer(&limit)
                .build(),
            impersonated_user,
            address,
            namespace: config.default_namespace.clone(),
            all_namespaces: false,
            format: None,
            controller_namespace: String::new(),
            route: LinkRoute::PortForward,
            token: UserToken::Kubeconfig(Box::new(config)),
            clock: Arc::new(Timestamp::now),
            export,
            is_terminal: std::io::stdout().is_terminal(),
        };
        Ok(session.with_flags(flags))
    }

    /// With what the flags set beside the connection to the API server.
    #[must_use]
    pub fn with_flags(mut self, flags: &ConnectionArgs) -> Self {
        if let Some(namespace) = &flags.namespace {
            self.namespace.clone_from(namespace);
        }
        if let Some(url) = &flags.link_url {
            self.route = LinkRoute::Direct(url.trim_end_matches('/').to_owned());
        }
        if let Some(name) = &flags.service_account {
            self.token = UserToken::ServiceAccount(name.clone());
        }
        self.all_namespaces = flags.all_namespaces;
        self.format = flags.output;
        self.controller_namespace.clone_from(&flags.controller_namespace);
        self
    }

    /// Refuses a request that the controller would receive as one of the user of the kubeconfig although the command is to
    /// act as another user: a bearer token cannot carry an impersonation.
    pub(super) fn refuse_impersonation(&self, namespace: &str) -> Result<(), PluginError> {
        let (Some(user), UserToken::Kubeconfig(_)) = (&self.impersonated_user, &self.token) else {
            return Ok(());
        };
        Err(PluginError::Usage(format!(
            "this command cannot impersonate {user} (--as, or as in the kubeconfig): it sends the token of the kubeconfig to the \
             controller, which would take the request for one of your own user. Leave out --as, or name a ServiceAccount of \
             namespace {namespace} with --service-account NAME: {user} then requests a token for it, and the controller \
             receives the request from the ServiceAccount"
        )))
    }

    /// Whether text is shown as it arrives, with this flag of the command. Never if the output is data.
    #[must_use]
    pub fn streams_text(&self, flag: Option<bool>) -> bool {
        streams_text(self.format, flag, self.is_terminal)
    }

    /// The present time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// The namespaced name of an object of the command's namespace.
    #[must_use]
    pub fn named(&self, name: &str) -> NamespacedName {
        NamespacedName::new(&self.namespace, name)
    }

    /// Agents of the command's namespace.
    #[must_use]
    pub fn agents(&self) -> Api<Agent> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// AgentBudgets of the command's namespace.
    #[must_use]
    pub fn budgets(&self) -> Api<AgentBudget> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// One Agent.
    pub async fn agent(&self, name: &str) -> Result<Agent, PluginError> {
        get(&self.agents(), "Agent", &self.named(name)).await
    }

    /// All Agents, or those that match a selector, by namespace and name.
    pub async fn list_agents(&self, selector: Option<&str>) -> Result<Vec<Agent>, PluginError> {
        let api = if self.all_namespaces {
            Api::all(self.client.clone())
        } else {
            self.agents()
        };
        list(&api, "Agents", selector).await
    }

    /// All AgentBudgets, by namespace and name.
    pub async fn list_budgets(&self) -> Result<Vec<AgentBudget>, PluginError> {
        let api = if self.all_namespaces {
            Api::all(self.client.clone())
        } else {
            self.budgets()
        };
        list(&api, "AgentBudgets", None).await
    }

    /// AgentBudgets of the controller's namespace, which may select Agents of others, unless [`Self::list_budgets`] has them
    /// already. `None`: the user may not list them.
    pub async fn list_platform_budgets(&self) -> Result<Option<Vec<AgentBudget>>, PluginError> {
        let namespace = &self.controller_namespace;
        if self.all_namespaces || *namespace == self.namespace {
            return Ok(Some(Vec::new()));
        }
        let budgets: Api<AgentBudget> = Api::namespaced(self.client.clone(), namespace);
        match budgets.list(&ListParams::default()).await {
            Ok(found) => Ok(Some(found.items)),
            Err(error) if is_forbidden(&error) => Ok(None),
            Err(error) => Err(PluginError::cluster(
                format!("list AgentBudgets of namespace {namespace}"),
                &error,
            )),
        }
    }

    /// Prints a value as JSON or YAML if that is the format of the output; otherwise returns false.
    pub fn print_data(&self, value: &impl Serialize, screen: &mut Screen<'_>) -> Result<bool, PluginError> {
        print_data(self.format, value, screen)
    }
}

fn streams_text(format: Option<OutputFormat>, flag: Option<bool>, is_terminal: bool) -> bool {
    let is_data = matches!(format, Some(OutputFormat::Json | OutputFormat::Yaml));
    !is_data && flag.unwrap_or(is_terminal)
}

/// Prints a value as JSON or YAML if that is the format; otherwise returns false.
pub fn print_data(
    format: Option<OutputFormat>,
    value: &impl Serialize,
    screen: &mut Screen<'_>,
) -> Result<bool, PluginError> {
    let wrong = |error: &dyn std::fmt::Display| PluginError::Format(error.to_string());
    let text = match format {
        Some(OutputFormat::Json) => serde_json::to_string_pretty(value).map_err(|error| wrong(&error))? + "\n",
        Some(OutputFormat::Yaml) => {
            // Through JSON, which keeps the order of fields and drops nothing that YAML has its own form for.
            let value = serde_json::to_value(value).map_err(|error| wrong(&error))?;
            serde_yaml::to_string(&value).map_err(|error| wrong(&error))?
        }
        Some(OutputFormat::Wide) | None => return Ok(false),
    };
    screen.out.write_all(text.as_bytes())?;
    Ok(true)
}

/// One object.
pub async fn get<K>(api: &Api<K>, kind: &str, name: &NamespacedName) -> Result<K, PluginError>
where
    K: Clone + DeserializeOwned + std::fmt::Debug + kube::Resource<DynamicType = ()>,
{
    api.get(&name.name).await.map_err(|error| {
        if is_of_unknown_path(&error) {
            PluginError::not_installed(&K::plural(&()))
        } else if is_not_found(&error) {
            PluginError::not_found(kind, name)
        } else {
            PluginError::cluster(format!("read {kind} {name}"), &error)
        }
    })
}

async fn list<K>(api: &Api<K>, kinds: &str, selector: Option<&str>) -> Result<Vec<K>, PluginError>
where
    K: Clone + DeserializeOwned + std::fmt::Debug + kube::Resource<DynamicType = ()>,
{
    let parameters = ListParams {
        label_selector: selector.map(str::to_owned),
        ..ListParams::default()
    };
    let found = api.list(&parameters).await;
    let mut found = found
        .map_err(|error| {
            if is_not_found(&error) {
                PluginError::not_installed(&K::plural(&()))
            } else {
                PluginError::cluster(format!("list {kinds}"), &error)
            }
        })?
        .items;
    found.sort_by_cached_key(|object| NamespacedName::of_metadata(object.meta()));
    Ok(found)
}

/// What the kubeconfig says, and the name of its context; `None`: it is that of a pod.
async fn config(flags: &ConnectionArgs) -> Result<(Config, Option<String>), PluginError> {
    let file = flags.kubeconfig.as_ref().map_or_else(
        || std::env::var("KUBECONFIG").unwrap_or_else(|_| "~/.kube/config".into()),
        |path| path.display().to_string(),
    );
    let wrong = |error: &KubeconfigError| PluginError::Kubeconfig(cluster_errors::kubeconfig(error, &file));
    match of_context(flags).await {
        Ok((config, context)) => Ok((config, Some(context))),
        // In a pod there is no kubeconfig. One that is there and wrong must not make the command that of another user.
        Err(error) if flags.kubeconfig.is_none() && flags.context.is_none() && is_missing(&error) => {
            let config = Config::incluster().map_err(|_| wrong(&error))?;
            Ok((config, None))
        }
        Err(error) => Err(wrong(&error)),
    }
}

/// Whether there is no kubeconfig, or one that names nothing.
fn is_missing(error: &KubeconfigError) -> bool {
    matches!(
        error,
        KubeconfigError::FindPath | KubeconfigError::ReadConfig(..) | KubeconfigError::CurrentContextNotSet
    )
}

/// The configuration of a context, and its name.
async fn of_context(flags: &ConnectionArgs) -> Result<(Config, String), KubeconfigError> {
    let file = if let Some(path) = &flags.kubeconfig {
        Kubeconfig::read_from(path)?
    } else {
        let listed = std::env::var_os("KUBECONFIG").and_then(|list| merged(&list));
        listed.unwrap_or_else(Kubeconfig::read)?
    };
    let context = flags.context.clone().or_else(|| file.current_context.clone());
    let options = KubeConfigOptions {
        context: context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = Config::from_custom_kubeconfig(file, &options).await?;
    Ok((config, context.unwrap_or_default()))
}

/// The files of a list as in $KUBECONFIG that exist, as one kubeconfig; `None`: none does. kubectl ignores the others too.
fn merged(list: &OsStr) -> Option<Result<Kubeconfig, KubeconfigError>> {
    let files = std::env::split_paths(list).filter(|path| path.exists());
    let files = files.map(Kubeconfig::read_from);
    files.reduce(|all, file| all?.merge(file?))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// A stream whose writes fail.
    struct FailingWriter(ErrorKind);

    impl Write for FailingWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_closed_output_ends_no_work_and_a_full_disk_is_an_error() {
        for (kind, is_lost) in [(ErrorKind::BrokenPipe, false), (ErrorKind::StorageFull, true)] {
            let mut screen = Screen {
                out: &mut FailingWriter(kind),
                err: &mut FailingWriter(kind),
            };
            screen.note("lost");
            assert_eq!(screen.result("done").is_err(), is_lost);
        }
    }

    #[test]
    fn missing_files_of_a_list_of_kubeconfigs_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let first = file("first", "current-context: a");
        let second = file("second", "contexts: [{name: b, context: {cluster: c, user: u}}]");
        let missing = folder.path().join("missing");
        let list = |paths: &[&std::path::Path]| std::env::join_paths(paths).unwrap();
        let all = merged(&list(&[&missing, &first, &second])).unwrap().unwrap();
        assert_eq!(all.current_context.as_deref(), Some("a"));
        assert_eq!(all.contexts[0].name, "b");
        assert!(merged(&list(&[&missing])).is_none());
        let invalid = file("invalid", "contexts: 1");
        assert!(merged(&list(&[&missing, &first, &invalid])).unwrap().is_err());
    }

    #[test]
    fn a_kubeconfig_that_is_wrong_is_not_a_missing_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        assert!(is_missing(&Kubeconfig::read_from(&path).unwrap_err()));
        std::fs::write(&path, "contexts: 1").unwrap();
        assert!(!is_missing(&Kubeconfig::read_from(&path).unwrap_err()));
        assert!(is_missing(&KubeconfigError::CurrentContextNotSet));
        assert!(!is_missing(&KubeconfigError::LoadContext("gone".into())));
    }

    #[test]
    fn notes_have_no_control_characters() {
        let mut err = Vec::new();
        note(&mut err, "error: \u{1b}[2Ja");
        assert_eq!(err, b"error:  [2Ja\n");
    }

    #[test]
    fn text_is_shown_as_it_arrives_on_a_terminal_or_with_the_flag_and_never_in_data() {
        for (format, flag, is_terminal, shown) in [
            (None, None, true, true),
            (Some(OutputFormat::Wide), None, true, true),
            (None, Some(false), true, false),
            (None, None, false, false),
            (None, Some(true), false, true),
            (Some(OutputFormat::Json), Some(true), true, false),
            (Some(OutputFormat::Yaml), None, true, false),
        ] {
            let found = streams_text(format, flag, is_terminal);
            assert_eq!(found, shown, "{format:?} {flag:?} {is_terminal}");
        }
    }
}
