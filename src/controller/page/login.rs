//! The forms of the page: to sign in, to sign out, and to choose a namespace.

use maud::{DOCTYPE, Markup, html};

use crate::page::html::head;

/// Field of the token.
pub(super) const TOKEN_FIELD: &str = "token";
/// Parameter of the namespace that is shown.
pub(super) const NAMESPACE_FIELD: &str = "namespace";

/// The page to sign in. `why`: why the last attempt failed.
pub(super) fn form(why: Option<&str>) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head(false))
            body {
                header { h1 { "agentloop" } }
                main {
                    h2 { "Sign in" }
                    @if let Some(why) = why { p .bad role="alert" { (why) } }
                    form method="post" action="/login" {
                        p {
                            label for=(TOKEN_FIELD) { "Token of the Kubernetes API" }
                            " "
                            input id=(TOKEN_FIELD) name=(TOKEN_FIELD) type="password" autocomplete="off" required autofocus;
                            " "
                            button { "Sign in" }
                        }
                    }
                    p { "For example one of " code { "kubectl create token NAME" } ". The page shows what its user may get." }
                }
            }
        }
    };
    page.into_string()
}

/// What the page has beside its title: whose session it is, and its forms.
pub(super) fn bar(user: &str, filter: Option<&String>) -> Markup {
    html! {
        form method="get" action="/" {
            label for=(NAMESPACE_FIELD) { "Namespace" }
            " "
            input id=(NAMESPACE_FIELD) name=(NAMESPACE_FIELD) value=(filter.map_or("", String::as_str)) placeholder="all";
            " "
            button { "Show" }
        }
        form method="post" action="/logout" {
            "Signed in as " span #user { (user) } ". "
            button { "Sign out" }
        }
    }
}
