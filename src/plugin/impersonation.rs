//! The user in whose name requests to the API server are made: that of the kubeconfig, or one that this user impersonates.
//!
//! The rules are those of kubectl: each flag is in the place of its field of the kubeconfig, and an empty user is none.

use std::ffi::OsString;

use axum::http::{HeaderName, HeaderValue};
use kube::Config;

use super::arguments::ImpersonationArgs;
use super::failure::PluginError;

impl ImpersonationArgs {
    /// The parser keeps only the groups after the name of the command if there are some before it too. `words`: what was parsed.
    pub fn refuse_lost_groups(&self, words: impl Iterator<Item = OsString>) -> Result<(), PluginError> {
        let is_group = |word: &OsString| {
            let word = word.to_string_lossy();
            word == "--as-group" || word.starts_with("--as-group=")
        };
        if words.filter(is_group).count() > self.groups.len() {
            return Err(PluginError::Usage(
                "--as-group is given before and after the name of the command: put all of them on one side".into(),
            ));
        }
        Ok(())
    }
}

/// Adds the headers of the impersonation to each request that is made with this configuration. Returns the user that is
/// impersonated.
pub fn apply(flags: &ImpersonationArgs, config: &mut Config) -> Result<Option<String>, PluginError> {
    // The fields are emptied, since the client accepts only ASCII in them: names of users and groups may have more.
    let auth = &mut config.auth_info;
    let text = |value: Option<String>| value.filter(|text| !text.is_empty());
    let (flag_user, flag_uid) = (text(flags.user.clone()), text(flags.uid.clone()));
    let (field_user, field_uid) = (text(auth.impersonate.take()), text(auth.impersonate_uid.take()));
    let mut groups = auth.impersonate_groups.take().unwrap_or_default();
    if !flags.groups.is_empty() {
        groups.clone_from(&flags.groups);
    }
    let uid = flag_uid.as_ref().or(field_uid.as_ref());
    let Some(user) = flag_user.or(field_user) else {
        if !flags.groups.is_empty() || flag_uid.is_some() {
            return Err(PluginError::Usage(
                "--as-group and --as-uid are of a user: name one with --as too".into(),
            ));
        }
        if uid.is_some() || !groups.is_empty() || auth.impersonate_user_extra.is_some() {
            return Err(PluginError::Kubeconfig(
                "its user has as-uid, as-groups or as-user-extra without as".into(),
            ));
        }
        return Ok(None);
    };
    let groups = groups.iter().map(|group| ("impersonate-group", group));
    let values = [("impersonate-user", &user)].into_iter().chain(groups);
    for (name, value) in values.chain(uid.map(|uid| ("impersonate-uid", uid))) {
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| {
            PluginError::Usage("a user, group or UID to impersonate has characters that a header cannot have".into())
        })?;
        config.headers.push((HeaderName::from_static(name), value));
    }
    Ok(Some(user))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use super::*;
    use crate::plugin::PluginCli;
    use crate::plugin::failure::ExitStatus;

    /// The headers, by name, as kubectl 1.32 sends them with the same flags and kubeconfig.
    fn applied(user: &Value, flags: &[&str]) -> Result<Vec<String>, PluginError> {
        let mut config = Config::new(axum::http::Uri::from_static("https://example.com"));
        config.auth_info = serde_json::from_value(user.clone()).unwrap();
        let flag = |name: &str| {
            let values = flags
                .iter()
                .filter_map(|flag| flag.strip_prefix(name)?.strip_prefix('='));
            values.map(str::to_owned).collect::<Vec<_>>()
        };
        let flags = ImpersonationArgs {
            user: flag("as").pop(),
            groups: flag("as-group"),
            uid: flag("as-uid").pop(),
        };
        let user = apply(&flags, &mut config)?;
        let header = |(name, value): &(HeaderName, HeaderValue)| {
            format!("{name}: {}", std::str::from_utf8(value.as_bytes()).unwrap())
        };
        let headers: Vec<String> = config.headers.iter().map(header).collect();
        let first = user.map(|user| format!("impersonate-user: {user}"));
        assert_eq!(first.as_ref(), headers.first());
        let auth = config.auth_info;
        assert!(auth.impersonate.is_none() && auth.impersonate_groups.is_none() && auth.impersonate_uid.is_none());
        Ok(headers)
    }

    #[test]
    fn flags_are_in_the_place_of_fields_of_the_kubeconfig() {
        let kate = json!({"token": "t", "as": "kate", "as-groups": ["kg"]});
        let (user, group, uid) = ("impersonate-user: ", "impersonate-group: ", "impersonate-uid: ");
        for (kubeconfig, flags, expected) in [
            (json!({}), &[][..], vec![]),
            (json!({"as": ""}), &["as="], vec![]),
            (json!({}), &["as=bob"], vec![(user, "bob")]),
            (
                json!({}),
                &["as=bob", "as-group=g,h", "as-group=i", "as-uid=1"],
                vec![(user, "bob"), (group, "g,h"), (group, "i"), (uid, "1")],
            ),
            (
                json!({}),
                &["as=jörg", "as-group=Entwickler München"],
                vec![(user, "jörg"), (group, "Entwickler München")],
            ),
            (kate.clone(), &[], vec![(user, "kate"), (group, "kg")]),
            (kate.clone(), &["as="], vec![(user, "kate"), (group, "kg")]),
            (kate.clone(), &["as=bob"], vec![(user, "bob"), (group, "kg")]),
            (kate.clone(), &["as-group=g"], vec![(user, "kate"), (group, "g")]),
            (kate, &["as-uid=3"], vec![(user, "kate"), (group, "kg"), (uid, "3")]),
        ] {
            let expected: Vec<String> = expected.iter().map(|(name, value)| format!("{name}{value}")).collect();
            assert_eq!(applied(&kubeconfig, flags).unwrap(), expected, "{kubeconfig} {flags:?}");
        }
    }

    #[test]
    fn groups_on_both_sides_of_the_command_are_refused() {
        for (line, is_refused) in [
            ("--as bob --as-group a status", false),
            ("--as bob status --as-group a --as-group=b", false),
            ("--as bob --as-group=a status --as-group b", true),
        ] {
            let words = || {
                std::iter::once("kubectl-agentloop")
                    .chain(line.split(' '))
                    .map(str::to_owned)
            };
            let asked = PluginCli::try_parse_from(words())
                .unwrap()
                .arguments
                .connection
                .impersonation;
            assert_eq!(
                asked.refuse_lost_groups(words().map(OsString::from)).is_err(),
                is_refused,
                "{line}"
            );
        }
    }

    #[test]
    fn groups_and_a_uid_without_a_user_are_refused() {
        for flags in [&["as-group=g"][..], &["as-uid=1"], &["as=", "as-group=g"]] {
            let refused = applied(&json!({}), flags).unwrap_err();
            assert_eq!(refused.exit_status(), ExitStatus::Usage);
            assert!(refused.to_string().contains("--as-group and --as-uid"), "{refused}");
        }
        for user in [
            json!({"as-groups": ["g"]}),
            json!({"as-uid": "1"}),
            json!({"as-user-extra": {"a": ["b"]}}),
        ] {
            let refused = applied(&user, &[]).unwrap_err();
            assert_eq!(refused.exit_status(), ExitStatus::Failure);
            assert!(refused.to_string().contains("without as"), "{refused}");
        }
        assert!(applied(&json!({"as-groups": ["g"]}), &["as=bob"]).is_ok());
    }

    #[test]
    fn a_name_that_no_header_can_have_is_refused_without_being_shown() {
        let refused = applied(&json!({}), &["as=bob\r\nauthorization: x"]).unwrap_err();
        assert_eq!(refused.exit_status(), ExitStatus::Usage);
        assert!(!refused.to_string().contains("bob"), "{refused}");
    }
}
