//! The page of the controller: who may see what, over HTTPS and in a browser, with a real worker and gateway.

use std::net::SocketAddr;

use agentloop::controller::page::{MAX_READERS, MAX_READERS_OF_ONE, MAX_SESSIONS_OF_ONE};
use jiff::Timestamp;
use pretty_assertions::assert_eq;
use reqwest::header::{COOKIE, SET_COOKIE};
use reqwest::redirect::Policy;
use reqwest::{Method, Response};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::harness::{CANARY, EDITOR, EventsHarness, READER, WAIT_TIMEOUT};
use crate::support::agents::{agent, view};
use crate::support::browser::{Browser, CHROMIUM};
use crate::support::clusters::has;
use crate::support::tokens::forged;

/// Token of one who may get the Agents of namespace `a` and their events.
const VIEWER: &str = "person viewer";
/// Token of one who may get the Agents of namespace `a`, without events.
const WATCHER: &str = "person watcher";
/// Token of one whose role names Agent `z` of namespace `b`.
const NAMER: &str = "person namer";
/// The form of a request of the page itself.
const OWN: &[(&str, &str)] = &[("sec-fetch-site", "same-origin")];

/// A browser without a screen or scripts.
struct Visitor {
    client: reqwest::Client,
    address: SocketAddr,
    cookie: Option<String>,
}

impl Visitor {
    async fn of(harness: &EventsHarness) -> Self {
        Self::at(harness, harness.serve_page(true).await)
    }

    fn at(harness: &EventsHarness, address: SocketAddr) -> Self {
        let root = reqwest::Certificate::from_pem(harness.authorities().as_bytes()).unwrap();
        let client = reqwest::Client::builder()
            .tls_certs_only([root])
            .redirect(Policy::none())
            .build()
            .unwrap();
        Self {
            client,
            address,
            cookie: None,
        }
    }

    async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: String) -> Response {
        let mut request = self.client.request(method, format!("https://{}{path}", self.address));
        if let Some(cookie) = &self.cookie {
            request = request.header(COOKIE, format!("other=1; {cookie}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request
            .header("content-type", "application/x-www-form-urlencoded")
            .body(body);
        timeout(WAIT_TIMEOUT, request.send()).await.unwrap().unwrap()
    }

    async fn get(&self, path: &str) -> Response {
        self.send(Method::GET, path, &[], String::new()).await
    }

    /// Status and text of a page.
    async fn read(&self, path: &str) -> (u16, String) {
        let response = self.get(path).await;
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn post(&self, path: &str, token: &str, headers: &[(&str, &str)]) -> Response {
        let body = format!("token={}", token.replace(' ', "+"));
        self.send(Method::POST, path, headers, body).await
    }

    /// Signs in; returns the cookie as it was set.
    async fn sign_in(&mut self, token: &str) -> String {
        let response = self.post("/login", token, OWN).await;
        assert_eq!((response.status().as_u16(), header(&response, "location")), (303, "/"));
        let set = header(&response, SET_COOKIE.as_str()).to_owned();
        self.cookie = set.split(';').next().map(ToOwned::to_owned);
        set
    }
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Reads a stream until it has these words.
async fn until(stream: &mut Response, words: &str) -> String {
    let mut text = String::new();
    while !text.contains(words) {
        let piece = timeout(WAIT_TIMEOUT, stream.chunk()).await;
        let piece = piece.unwrap_or_else(|_| panic!("never {words}: {text}")).unwrap();
        text += std::str::from_utf8(&piece.unwrap_or_else(|| panic!("it ended without {words}: {text}"))).unwrap();
    }
    text
}

#[tokio::test]
async fn without_a_session_there_is_the_form_and_no_state() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    for cookie in [None, Some("__Host-agentloop=0123".to_owned())] {
        visitor.cookie = cookie;
        let first = visitor.get("/").await;
        assert_eq!((first.status().as_u16(), header(&first, "location")), (303, "/login"));
        for (method, path, expected) in [
            ("GET", "/?namespace=a", 303),
            ("GET", "/events", 401),
            ("HEAD", "/events", 401),
            ("GET", "/login", 200),
            ("GET", "/page.js", 200),
            ("GET", "/page.css", 200),
            ("GET", "/none", 404),
            ("GET", "/login/", 404),
            ("POST", "/", 405),
            ("DELETE", "/events", 405),
            ("PUT", "/login", 405),
            ("GET", "/logout", 405),
        ] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let response = visitor.send(method.clone(), path, &[], String::new()).await;
            assert_eq!(response.status().as_u16(), expected, "{method} {path}");
            for (name, words) in [
                (
                    "content-security-policy",
                    "default-src 'none'; script-src 'self'; style-src 'self';",
                ),
                ("content-security-policy", "form-action 'self'; frame-ancestors 'none'"),
                ("cache-control", "no-store"),
                ("x-content-type-options", "nosniff"),
                ("cross-origin-resource-policy", "same-origin"),
            ] {
                let value = header(&response, name);
                assert!(
                    value.contains(words) && !value.contains("unsafe"),
                    "{method} {path}: {name}: {value}"
                );
            }
            let body = response.text().await.unwrap();
            for secret in ["a/x", "b/z", "viewer"] {
                assert!(!body.contains(secret), "{method} {path}: {body}");
            }
        }
    }
    assert!(harness.asked().is_empty(), "nobody's rights were asked for");
}

#[tokio::test]
async fn an_invalid_token_and_a_cross_site_form_start_no_session() {
    let harness = EventsHarness::start().await;
    let visitor = Visitor::of(&harness).await;
    let own = format!("https://{}", visitor.address);
    let other = own.replace("https", "http");
    let long = "x".repeat(16 * 1024);
    for (token, headers, expected, words) in [
        ("wrong", OWN, 401, "rejected the token"),
        ("", OWN, 400, "no token"),
        (&long, OWN, 400, "too large"),
        (VIEWER, &[][..], 403, "the forms of this page"),
        (VIEWER, &[("sec-fetch-site", "cross-site")], 403, "the forms"),
        (
            VIEWER,
            &[("sec-fetch-site", "same-site"), ("origin", &own)],
            403,
            "the forms",
        ),
        (VIEWER, &[("origin", "null")], 403, "the forms"),
        (VIEWER, &[("origin", "https://evil.example")], 403, "the forms"),
        (VIEWER, &[("origin", &other)], 403, "the forms"),
        (VIEWER, &[("origin", &own)], 303, ""),
    ] {
        let response = visitor.post("/login", token, headers).await;
        let status = response.status().as_u16();
        let cookie = header(&response, SET_COOKIE.as_str()).to_owned();
        let body = response.text().await.unwrap();
        assert_eq!(
            (status, cookie.is_empty()),
            (expected, expected != 303),
            "{headers:?}: {body}"
        );
        assert!(body.contains(words), "{body}");
        assert!(token.is_empty() || !body.contains(token), "a token is not repeated");
    }
}

#[tokio::test]
async fn forged_tokens_from_a_shared_address_lock_no_other_user_out() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    for number in 0..25 {
        let response = visitor.post("/login", &format!("forged-{number}"), OWN).await;
        assert_eq!(response.status().as_u16(), 401, "{number}");
    }
    visitor.sign_in(VIEWER).await;
}

#[tokio::test]
async fn a_cookie_has_no_token_and_is_for_this_server_over_https_only() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    let token = forged(&json!(["x"]), 4_102_444_800, "viewer", VIEWER);
    let set = visitor.sign_in(&token).await;
    let (cookie, attributes) = set.split_once("; ").unwrap();
    assert_eq!(attributes, "Path=/; Secure; HttpOnly; SameSite=Strict");
    let id = cookie.strip_prefix("__Host-agentloop=").unwrap();
    assert!(
        id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{id}"
    );
    assert!(!token.contains(id));
    let again = visitor.sign_in(&token).await;
    assert_ne!(set, again, "each session has an id of its own");
}

#[rstest]
#[case::a_viewer_of_a_namespace(VIEWER, &["x", "y"], &["z"])]
#[case::one_without_events(WATCHER, &["x", "y"], &["z"])]
#[case::a_role_with_a_name(NAMER, &["z"], &["x", "y"])]
#[case::one_who_may_only_get_events(READER, &[], &["x", "y", "z"])]
#[case::one_who_may_nothing("person nobody", &[], &["x", "y", "z"])]
#[case::one_who_may_all(EDITOR, &["x", "y", "z"], &[])]
#[tokio::test]
async fn a_user_sees_only_the_agents_that_the_user_may_read(
    #[case] token: &str,
    #[case] seen: &[&str],
    #[case] unseen: &[&str],
) {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(token).await;
    let mut stream = visitor.get("/events").await;
    let (status, page) = visitor.read("/").await;
    let first = until(&mut stream, "\"id\":\"approvals\"").await;
    assert_eq!(status, 200);
    for text in [&page, &first.replace("\\\"", "\"")] {
        let has = |name: &str| {
            let row = |name: &str| text.contains(&format!("<th scope=\"row\">{name}</th>"));
            row(name) || row(&format!("a/{name}")) || row(&format!("b/{name}"))
        };
        for name in seen {
            assert!(has(name), "{name}: {text}");
        }
        for name in unseen {
            assert!(!has(name), "{name}: {text}");
        }
    }
    assert!(
        page.contains(&format!("<span id=\"user\">{}</span>", &token[7..])),
        "{page}"
    );
    assert_eq!(page.contains("There are no Agents here that"), seen.is_empty());
    // What is not shown is not counted or named either, also to one who asks for it.
    for namespace in ["a", "b", "none"] {
        let (status, page) = visitor.read(&format!("/?namespace={namespace}")).await;
        let shows = namespace == "a" && seen.contains(&"x") || namespace == "b" && seen.contains(&"z");
        assert_eq!(
            (status, page.contains("<tr><th scope=\"row\">")),
            (200, shows),
            "{page}"
        );
        assert_eq!(page.contains("There are no Agents here that"), !shows);
    }
}

#[tokio::test]
async fn the_page_does_not_reveal_the_number_of_forbidden_objects() {
    let mut harness = EventsHarness::start().await;
    let many: Vec<_> = (0..300)
        .map(|number| agent("crowded", &format!("x{number}"), &json!({})))
        .collect();
    harness.agents = view(&many);
    let mut visitor = Visitor::of(&harness).await;
    let mut bodies = Vec::new();
    for namespace in ["crowded", "deserted"] {
        // A session of its own, which asks at once.
        visitor.sign_in("person nobody").await;
        let (status, first) = visitor.read(&format!("/?namespace={namespace}")).await;
        assert_eq!(status, 200);
        let (_, again) = visitor.read("/?namespace=other").await;
        bodies.push((first.replace(namespace, "NAMESPACE"), again));
    }
    assert_eq!(bodies[0], bodies[1]);
    assert!(bodies[0].0.contains("choose its namespace"), "{}", bodies[0].0);
    visitor.sign_in(EDITOR).await;
    assert!(!visitor.read("/").await.1.contains("choose its namespace"));
}

#[tokio::test]
async fn turns_are_streamed_to_users_with_access_to_events_and_contain_no_text() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(VIEWER).await;
    let mut stream = visitor.get("/events").await;
    let text = until(&mut stream, "autonomy:turn_completed").await;
    assert!(
        text.contains("\"id\":\"turns/a/x\"") && text.contains("model:call_answered"),
        "{text}"
    );
    let more = until(&mut stream, "\"id\":\"turns/a/x\"").await;
    let (status, page) = visitor.read("/").await;
    assert_eq!(status, 200);
    assert!(
        page.contains("autonomy:turn_completed") && page.contains("turns/a/x"),
        "{page}"
    );
    for text in [text, more, page] {
        assert!(!text.contains(CANARY), "{text}");
    }
    // The Agents are followed for others too, whose page does not have their turns.
    visitor.sign_in(WATCHER).await;
    let (_, page) = visitor.read("/").await;
    assert!(!page.contains("autonomy:") && !page.contains("turns/a"), "{page}");
    assert!(
        page.contains("Turns of 2 Agents: watcher needs the permission to get agents/events"),
        "{page}"
    );
}

#[tokio::test]
async fn signing_out_ends_the_session_and_its_streams() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(VIEWER).await;
    let mut stream = visitor.get("/events").await;
    until(&mut stream, "approvals").await;
    assert_eq!(visitor.post("/logout", "", &[]).await.status().as_u16(), 403);
    assert_eq!(
        visitor.get("/").await.status().as_u16(),
        200,
        "another site ends nothing"
    );
    let response = visitor.post("/logout", "", OWN).await;
    assert_eq!(
        (response.status().as_u16(), header(&response, "location")),
        (303, "/login")
    );
    assert!(header(&response, SET_COOKIE.as_str()).contains("__Host-agentloop=; Path=/; Secure;"));
    until(
        &mut stream,
        "event: end\ndata: \"The session has ended: sign in again\"",
    )
    .await;
    assert_eq!(timeout(WAIT_TIMEOUT, stream.chunk()).await.unwrap().unwrap(), None);
    assert_eq!(visitor.get("/").await.status().as_u16(), 303);
    assert_eq!(visitor.get("/events").await.status().as_u16(), 401);
}

#[tokio::test]
async fn signing_in_again_ends_the_session_that_it_replaces() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(VIEWER).await;
    let first = visitor.cookie.clone();
    let mut stream = visitor.get("/events").await;
    until(&mut stream, "approvals").await;
    assert_eq!(visitor.post("/login", "wrong", OWN).await.status().as_u16(), 401);
    assert_eq!(visitor.get("/").await.status().as_u16(), 200, "a failure ends nothing");
    visitor.sign_in(WATCHER).await;
    let second = visitor.cookie.take();
    until(&mut stream, "The session has ended").await;
    visitor.cookie = first;
    assert_eq!(visitor.get("/").await.status().as_u16(), 303);
    visitor.cookie = second;
    assert_eq!(visitor.get("/").await.status().as_u16(), 200);
}

#[tokio::test]
async fn a_session_ends_with_its_token() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    // Long enough to sign in and open the stream, also on a machine that stalls.
    let token = forged(&json!(["x"]), Timestamp::now().as_second() + 15, "viewer", VIEWER);
    visitor.sign_in(&token).await;
    let mut stream = visitor.get("/events").await;
    until(
        &mut stream,
        "event: end\ndata: \"The session has ended: sign in again\"",
    )
    .await;
    assert_eq!(visitor.get("/").await.status().as_u16(), 303);
    let past = forged(&json!(["x"]), Timestamp::now().as_second() - 1, "viewer", VIEWER);
    let response = visitor.post("/login", &past, OWN).await;
    assert_eq!(response.status().as_u16(), 401);
    assert!(response.text().await.unwrap().contains("The token has expired."));
}

#[tokio::test]
async fn streams_and_sessions_of_a_user_are_bounded() {
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(VIEWER).await;
    let first = visitor.cookie.clone();
    let mut streams = Vec::new();
    for _ in 0..MAX_READERS_OF_ONE {
        let stream = visitor.get("/events").await;
        assert_eq!(stream.status().as_u16(), 200);
        streams.push(stream);
    }
    let refusal = "you have 4 live pages already, which is the most for one user; close one and reload this page\n";
    let refusal = (429, refusal.to_owned());
    assert_eq!(visitor.read("/events").await, refusal);
    visitor.cookie = None;
    visitor.sign_in(VIEWER).await;
    assert_eq!(visitor.read("/events").await, refusal, "in another session as well");
    let mut another = Visitor::at(&harness, visitor.address);
    another.sign_in(WATCHER).await;
    assert_eq!(another.get("/events").await.status().as_u16(), 200, "of another user");
    drop(streams.pop());
    let freed = async {
        loop {
            let stream = visitor.get("/events").await;
            if stream.status().as_u16() == 200 {
                return stream;
            }
        }
    };
    streams.push(timeout(WAIT_TIMEOUT, freed).await.expect("room when one ends"));
    assert_eq!(visitor.read("/events").await, refusal);
    for _ in 1..MAX_SESSIONS_OF_ONE {
        visitor.cookie = None;
        visitor.sign_in(VIEWER).await;
        assert_eq!(visitor.get("/").await.status().as_u16(), 200);
    }
    visitor.cookie = first;
    assert_eq!(visitor.get("/").await.status().as_u16(), 303, "the oldest gave way");
    until(&mut streams[0], "The session has ended").await;
}

#[tokio::test]
async fn users_of_all_streams_do_not_lock_out_others() {
    let harness = EventsHarness::start().await;
    let address = harness.serve_page(true).await;
    let mut streams = Vec::new();
    for user in 0..MAX_READERS / MAX_READERS_OF_ONE {
        let mut visitor = Visitor::at(&harness, address);
        visitor.sign_in(&format!("person nobody-{user}")).await;
        for _ in 0..MAX_READERS_OF_ONE {
            let stream = visitor.get("/events").await;
            assert_eq!(stream.status().as_u16(), 200);
            streams.push(stream);
        }
    }
    let mut viewer = Visitor::at(&harness, address);
    viewer.sign_in(VIEWER).await;
    let mut stream = viewer.get("/events").await;
    until(&mut stream, "turns/a/x").await;
    until(&mut streams[0], "event: end\ndata: \"Not live: too many pages are open").await;
    assert!(streams[0].chunk().await.unwrap().is_none(), "it has ended");
}

#[tokio::test]
async fn until_the_caches_are_filled_nothing_is_answered() {
    let harness = EventsHarness::start().await;
    let visitor = Visitor::at(&harness, harness.serve_page(false).await);
    for path in ["/", "/login", "/events"] {
        let (status, text) = visitor.read(path).await;
        assert_eq!(
            (status, text.as_str()),
            (503, "the controller is starting; retry\n"),
            "{path}"
        );
    }
    assert_eq!(visitor.post("/login", VIEWER, OWN).await.status().as_u16(), 503);
}

/// The number of the newest turn that the page shows.
const TURN: &str = "Number(document.querySelector('[id=\"turns/a/x\"] tbody th')?.textContent ?? 0)";

#[tokio::test]
async fn a_user_signs_in_watches_turns_live_and_signs_out_in_a_browser() {
    if !has(CHROMIUM) {
        return;
    }
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let url = format!("https://{}/", harness.serve_page(true).await);
    let mut browser = Browser::start_with(&["--ignore-certificate-errors"]).await;
    browser
        .before_pages(
            "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective))",
        )
        .await;
    browser.open(&url).await;
    assert_eq!(browser.value("location.pathname").await, "/login");
    let sign_in = |token: &str| {
        format!("document.getElementById('token').value = '{token}'; document.querySelector('form').requestSubmit()")
    };
    browser.leave(&sign_in("wrong"), &format!("{url}login")).await;
    browser
        .until("document.querySelector('[role=alert]').textContent.includes('rejected the token')")
        .await;
    browser.leave(&sign_in(VIEWER), &url).await;
    browser
        .until("document.getElementById('connection').textContent === 'Live'")
        .await;
    assert_eq!(
        browser.value("document.getElementById('user').textContent").await,
        "viewer"
    );
    assert_eq!(browser.value("document.cookie").await, "", "scripts do not have it");
    browser.value("window.same = true").await;
    browser.until(&format!("{TURN} > 0")).await;
    let before = browser.value(TURN).await.as_i64().unwrap();
    browser.until(&format!("{TURN} >= {}", before + 2)).await;
    assert_eq!(browser.value("window.same").await, true, "it was loaded again");
    let text = browser.value("document.documentElement.outerHTML").await;
    let text = text.as_str().unwrap();
    assert!(!text.contains(CANARY) && !text.contains("b/z"), "{text}");
    assert_eq!(browser.value("refused").await, json!([]), "the policy admits the page");

    // What a text from outside could bring: the policy refuses it even in markup.
    let injected = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')";
    browser.value(injected).await;
    let refused = "new Promise(done => {
        const look = () => { if (refused.length >= 2) done(refused.sort()); };
        addEventListener('securitypolicyviolation', look);
        look();
    })";
    assert_eq!(browser.value(refused).await, json!(["img-src", "script-src-attr"]));
    assert_eq!(browser.value("window.ran").await, Value::Null);

    let sign_out = "document.querySelector('form[action=\"/logout\"]').requestSubmit()";
    browser.leave(sign_out, &format!("{url}login")).await;
    browser.open(&url).await;
    assert_eq!(browser.value("location.pathname").await, "/login");
}

#[tokio::test]
async fn a_page_that_is_not_live_says_why_in_a_browser() {
    if !has(CHROMIUM) {
        return;
    }
    let harness = EventsHarness::start().await;
    let mut visitor = Visitor::of(&harness).await;
    visitor.sign_in(VIEWER).await;
    let mut streams = Vec::new();
    for _ in 0..MAX_READERS_OF_ONE {
        streams.push(visitor.get("/events").await);
    }
    let url = format!("https://{}/", visitor.address);
    let mut browser = Browser::start_with(&["--ignore-certificate-errors"]).await;
    browser.open(&url).await;
    let sign_in =
        format!("document.getElementById('token').value = '{VIEWER}'; document.querySelector('form').requestSubmit()");
    browser.leave(&sign_in, &url).await;
    let connection = "document.getElementById('connection').textContent";
    let refused = format!("{connection}.startsWith('Not live: you have 4 live pages already')");
    browser.until(&refused).await;
    streams.clear();
    let live = async {
        while browser.value(connection).await != "Live" {
            browser.leave("location.reload()", &url).await;
            browser.until(&format!("{refused} || {connection} === 'Live'")).await;
        }
    };
    timeout(WAIT_TIMEOUT, live).await.expect("room when the others end");
}
