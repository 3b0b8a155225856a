//! The errors of the plugin, as users read them.

use std::io;

use super::failure::PluginError;
use super::link::LinkFailure;

#[test]
fn the_errors_of_the_plugin() {
    let mut rows = variants!(
        "Commands",
        [
            PluginError::not_found("Agent", &crate::api::NamespacedName::new("team-a", "helper")),
            PluginError::Usage("helper has several open gates: name one, or use --all; open: g1, g2".into()),
            PluginError::Kubeconfig("context other was not found".into()),
            PluginError::Cluster {
                action: "list Agents".into(),
                problem: "https://10.0.0.1:6443 (context \"prod\"): connection refused".into(),
                is_forbidden: false,
            },
            PluginError::Link(LinkFailure::Unreadable("expected value at line 1".into())),
            PluginError::Stream(io::Error::from(io::ErrorKind::UnexpectedEof)),
            PluginError::Format("key must be a string".into()),
        ]
    );
    rows.extend(variants!(
        "Requests to the controller",
        [
            LinkFailure::Refused {
                status: 403,
                message: "ann may not get agents/events of Agent team-a/helper".into(),
            },
            LinkFailure::Token("ServiceAccount reader of namespace team-a does not exist".into()),
            LinkFailure::Unreachable("connection refused".into()),
            LinkFailure::Ended("the pod of this Agent was deleted or replaced; reconnect with the last id".into()),
            LinkFailure::Unreadable("expected value at line 1".into()),
        ]
    ));
    assert_texts!("plugin", "Errors of the kubectl plugin", rows);
}
