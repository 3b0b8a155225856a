//! Where the database is: a connection string as libpq takes it, with its modes of TLS.
//!
//! What the client library does not know of it is read here: `sslmode` and `sslrootcert`. Nothing is ignored; a setting
//! without an effect is an error.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use super::error::TargetError;

/// Time limit for a connection, if the connection string has none.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Name of the connections in `pg_stat_activity`, if the connection string has none.
const APPLICATION: &str = "agentloop";

/// How the connection is protected: `sslmode` of libpq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// `disable`: no TLS.
    Disable,
    /// `prefer`, the default: TLS if the server has it, with any certificate.
    Prefer,
    /// `require`: TLS with any certificate, or with one of the CA if one is given.
    Require,
    /// `verify-ca`: TLS with a certificate of the CA, for any host.
    VerifyCa,
    /// `verify-full`: TLS with a certificate of the CA for this host.
    VerifyFull,
}

impl TlsMode {
    fn parse(name: &str) -> Result<Self, TargetError> {
        Ok(match name {
            "disable" => Self::Disable,
            "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            // `allow` would send a password without TLS although the server has it.
            _ => return Err(TargetError::TlsMode),
        })
    }
}

/// Settings that the client library knows, besides those that are read here.
const KNOWN: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "options",
    "application_name",
    "sslnegotiation",
    "host",
    "hostaddr",
    "port",
    "connect_timeout",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
];
/// Settings of libpq without an effect here, which may be named: any other word may be a part of a password.
const WITHOUT_EFFECT: [&str; 16] = [
    "client_encoding",
    "fallback_application_name",
    "gssencmode",
    "keepalives_count",
    "krbsrvname",
    "passfile",
    "replication",
    "require_auth",
    "requiressl",
    "service",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslpassword",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
];

/// The file of a CA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RootFile {
    pub(crate) path: PathBuf,
    /// Its path is in the connection string, and so must not be shown.
    is_secret: bool,
}

impl RootFile {
    /// The file as errors name it.
    pub(crate) fn shown(&self) -> &Path {
        if self.is_secret {
            Path::new("the file that sslrootcert names")
        } else {
            &self.path
        }
    }
}

/// A database, as a connection string names it. Not printable: it holds a password.
pub struct DatabaseTarget {
    pub(crate) config: Config,
    pub(crate) tls: TlsMode,
    pub(crate) root: Option<RootFile>,
}

impl DatabaseTarget {
    /// Reads a connection string. `ca_file` takes precedence over its `sslrootcert`.
    pub fn read(file: &Path, ca_file: Option<&Path>) -> Result<Self, TargetError> {
        let text = std::fs::read_to_string(file).map_err(|error| TargetError::File {
            file: file.into(),
            error,
        })?;
        let malformed = |problem: String| TargetError::Malformed {
            file: file.into(),
            problem,
        };
        let mut settings = ConnectionSettings::parse(text.trim()).map_err(malformed)?;
        settings.check_names().map_err(malformed)?;
        let tls = settings
            .take("sslmode")
            .map_or(Ok(TlsMode::Prefer), |mode| TlsMode::parse(&mode))?;
        let root = settings.take("sslrootcert");
        if root.as_deref() == Some("system") {
            return Err(TargetError::SystemRoots);
        }
        let root_file = |is_secret| move |path: PathBuf| RootFile { path, is_secret };
        let given = ca_file.map(Path::to_owned).map(root_file(false));
        let root = given.or(root.map(PathBuf::from).map(root_file(true)));
        match tls {
            TlsMode::VerifyCa if root.is_none() => return Err(TargetError::NoRoot("verify-ca")),
            TlsMode::VerifyFull if root.is_none() => return Err(TargetError::NoRoot("verify-full")),
            TlsMode::Disable | TlsMode::Prefer | TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => {}
        }
        let config = settings.text().parse::<Config>();
        let mut config = config.map_err(|error| malformed(reason(&error)))?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(malformed("it has no host".into()));
        }
        config.ssl_mode(match tls {
            TlsMode::Disable => SslMode::Disable,
            TlsMode::Prefer => SslMode::Prefer,
            TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
        });
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT);
        }
        if config.get_application_name().is_none() {
            config.application_name(APPLICATION);
        }
        Ok(Self { config, tls, root })
    }

    /// The mode of TLS.
    #[must_use]
    pub fn tls(&self) -> TlsMode {
        self.tls
    }
}

/// What the client library says, if that is the name of a known setting. Other messages quote what they do not understand.
fn reason(error: &tokio_postgres::Error) -> String {
    let problem = std::error::Error::source(error).map(ToString::to_string);
    let names = |name: &&&str| problem.as_deref() == Some(&format!("invalid value for option `{name}`"));
    match KNOWN.iter().find(names) {
        Some(name) => format!("the value of {name} is not valid"),
        None => "it cannot be parsed".into(),
    }
}

/// The settings in a connection string, in one of its two forms.
enum ConnectionSettings {
    /// `postgresql://...?key=value`: the part before the query, and the query.
    Url(String, Vec<(String, String)>),
    /// `key=value key='value'`.
    Pairs(Vec<(String, String)>),
}

impl ConnectionSettings {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("it is empty".into());
        }
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return pairs(text).map(Self::Pairs);
        }
        let (base, query) = text.split_once('?').unwrap_or((text, ""));
        let settings = query.split('&').filter(|setting| !setting.is_empty()).map(|setting| {
            let (key, value) = setting.split_once('=').ok_or("a setting after the ? has no value")?;
            Ok((key.to_owned(), value.to_owned()))
        });
        let settings: Result<Vec<_>, String> = settings.collect();
        Ok(Self::Url(base.to_owned(), settings?))
    }

    /// Refuses settings without an effect.
    fn check_names(&self) -> Result<(), String> {
        let (settings, of) = match self {
            Self::Url(_, settings) => (settings, "after the ?"),
            Self::Pairs(settings) => (settings, "of its settings"),
        };
        let is_known = |name: &str| KNOWN.contains(&name) || ["sslmode", "sslrootcert"].contains(&name);
        let names = settings.iter().map(|(name, _)| name.as_str());
        match names.enumerate().find(|(_, name)| !is_known(name)) {
            None => Ok(()),
            Some((_, name)) if WITHOUT_EFFECT.contains(&name) => Err(format!("the setting {name} is not supported")),
            Some((place, _)) => Err(format!("number {} {of} has an unknown name", place + 1)),
        }
    }

    /// Removes a setting. The last one counts, as for libpq.
    fn take(&mut self, key: &str) -> Option<String> {
        let (settings, is_url) = match self {
            Self::Url(_, settings) => (settings, true),
            Self::Pairs(settings) => (settings, false),
        };
        let mut taken = None;
        settings.retain(|(name, value)| {
            if name == key {
                taken = Some(if is_url { percent_decoded(value) } else { value.clone() });
            }
            name != key
        });
        taken
    }

    fn text(&self) -> String {
        match self {
            Self::Url(base, settings) => {
                let settings: Vec<_> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
                if settings.is_empty() {
                    base.clone()
                } else {
                    format!("{base}?{}", settings.join("&"))
                }
            }
            Self::Pairs(settings) => {
                let quoted = |value: &str| value.replace('\\', r"\\").replace('\'', r"\'");
                let settings = settings.iter().map(|(key, value)| format!("{key}='{}'", quoted(value)));
                settings.collect::<Vec<_>>().join(" ")
            }
        }
    }
}

/// Splits `key = value key='quoted \' value'`.
fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=').ok_or("a word is not key=value")?;
        let key = key.trim();
        if key.is_empty() || key.contains(char::is_whitespace) {
            return Err("a word is not key=value".into());
        }
        let (value, after) = value(after.trim_start())?;
        pairs.push((key.to_owned(), value));
        rest = after.trim_start();
    }
    Ok(pairs)
}

/// Reads a value, quoted or not; returns what follows it.
fn value(text: &str) -> Result<(String, &str), String> {
    let (text, is_quoted) = text.strip_prefix('\'').map_or((text, false), |text| (text, true));
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            '\'' if is_quoted => return Ok((value, &text[at + 1..])),
            space if space.is_whitespace() && !is_quoted => return Ok((value, &text[at..])),
            other => value.push(other),
        }
    }
    if is_quoted {
        return Err("a quote is not closed".into());
    }
    Ok((value, ""))
}

/// Decodes `%2F`; what is not an escape stays as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escape = (*first == b'%').then(|| after.get(..2)).flatten();
        let escape = escape.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(escape.unwrap_or(*first));
        rest = if escape.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::tls::TlsConnector;
    use super::*;

    fn read(text: &str) -> Result<DatabaseTarget, TargetError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        DatabaseTarget::read(file.path(), None)
    }

    #[rstest]
    #[case::url_without("postgres://u:p@h/d", TlsMode::Prefer, None)]
    #[case::url(
        "postgresql://u:p@h/d?sslmode=verify-full&sslrootcert=%2Fca.crt\n",
        TlsMode::VerifyFull,
        Some("/ca.crt")
    )]
    #[case::last_counts("postgres://h/d?sslmode=disable&sslmode=require", TlsMode::Require, None)]
    #[case::pairs(
        "host=h sslmode = verify-ca sslrootcert='/a b/ca.crt' password='it''s'",
        TlsMode::VerifyCa,
        Some("/a b/ca.crt")
    )]
    #[case::disabled("host=/run/postgresql user=u sslmode=disable", TlsMode::Disable, None)]
    fn modes_of_tls_are_read_from_both_forms(#[case] text: &str, #[case] mode: TlsMode, #[case] root: Option<&str>) {
        let text = text.replace("''", r"\'");
        let target = read(&text).unwrap();
        let path = target.root.as_ref().map(|root| root.path.as_path());
        assert_eq!((target.tls, path), (mode, root.map(Path::new)));
        assert_eq!(target.config.get_application_name(), Some("agentloop"));
    }

    #[rstest]
    #[case::allow("postgres://u:canary@h/d?sslmode=allow", "the value of sslmode")]
    #[case::unknown(
        "host=h password=canary sslmode=on",
        "the value of sslmode in the connection string is not supported"
    )]
    #[case::no_root("postgres://u:canary@h/d?sslmode=verify-full", "sslmode=verify-full requires a CA")]
    #[case::no_root_ca("host=h sslmode=verify-ca password=canary", "sslmode=verify-ca requires a CA")]
    #[case::system(
        "host=h sslmode=verify-full sslrootcert=system password=canary",
        "sslrootcert=system is not supported"
    )]
    #[case::client_certificate("host=h sslcert=/c.crt password=canary", "the setting sslcert is not supported")]
    #[case::in_url("postgres://u:canary@h/d?sslkey=/k", "the setting sslkey is not supported")]
    #[case::mode_with_more("postgres://u:p@h/d?sslmode=require,canary", "the value of sslmode")]
    #[case::question_mark_in_the_password(
        "postgres://u:can?ary=canary@h/d",
        "number 1 after the ? has an unknown name"
    )]
    #[case::ampersand_in_the_password(
        "postgres://u@h/d?password=p&canary=1",
        "number 2 after the ? has an unknown name"
    )]
    #[case::name_in_url("postgres://u@h/d?canary=1", "number 1 after the ? has an unknown name")]
    #[case::name_in_pairs("host=h canary=1", "number 2 of its settings has an unknown name")]
    #[case::value("host=h port=canary", "the value of port is not valid")]
    #[case::port_in_url("postgres://u:p@h:canary/d", "the value of port is not valid")]
    #[case::bracket("postgres://u:p@[canary/d", "cannot be")]
    #[case::not_pairs("canary", "a word is not key=value")]
    #[case::quote("host=h password='canary", "a quote is not closed")]
    #[case::no_host("password=canary dbname=d", "it has no host")]
    #[case::empty(" \n", "it is empty")]
    fn what_is_not_supported_is_refused_without_quoting_the_password(#[case] text: &str, #[case] words: &str) {
        let error = read(text).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("canary"), "{error}");
    }

    #[test]
    fn a_file_of_a_ca_that_the_connection_string_names_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("canary.crt");
        std::fs::write(&empty, "").unwrap();
        for file in ["/canary", empty.to_str().unwrap()] {
            let target = read(&format!("host=h sslmode=verify-full sslrootcert={file}")).unwrap();
            let error = TlsConnector::new(&target).map(|_| ()).unwrap_err().to_string();
            assert!(
                error.contains("the file that sslrootcert names") && !error.contains("canary"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_file_of_the_ca_takes_precedence_and_settings_reach_the_client() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            r"host=a,b user=u password='p\' \\' sslmode=verify-full sslrootcert=/old connect_timeout=9",
        )
        .unwrap();
        let target = DatabaseTarget::read(file.path(), Some(Path::new("/new"))).unwrap();
        assert_eq!(target.root.unwrap().shown(), Path::new("/new"));
        assert_eq!(target.config.get_password(), Some(br"p' \".as_slice()));
        assert_eq!(target.config.get_hosts().len(), 2);
        assert_eq!(target.config.get_connect_timeout(), Some(&Duration::from_secs(9)));
    }
}
