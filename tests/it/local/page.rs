//! The page of a run: in a browser, live; and over HTTP.

use serde_json::{Value, json};

use super::examples::example;
use super::process::{CANARY, LocalHarness, Run, scripted, various};
use super::sources::until;
use crate::support::browser::{Browser, CHROMIUM};
use crate::support::clusters::has;
use crate::support::http;

/// The URL of the page, once it is printed.
async fn url(run: &mut Run) -> String {
    until(run, "serves a page", |run| {
        let line = run.lines().into_iter().find(|line| line["type"] == "page")?;
        line["url"].as_str().map(ToOwned::to_owned)
    })
    .await
}

/// Status and body of the page.
fn get(url: &str) -> (u16, String) {
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    http::request(address, "GET", &format!("/{path}"), "text/plain", "")
}

/// The completed turns of an Agent, as its row shows them.
const TURNS: &str = "Number([...document.querySelectorAll('#agents tbody tr')]
    .find(row => row.cells[0].textContent === 'scout').cells[3].textContent)";

#[tokio::test]
async fn the_page_of_the_local_example_changes_in_a_browser_without_a_reload() {
    if !has(CHROMIUM) {
        return;
    }
    let mut harness = LocalHarness::new();
    example(&harness, "local.yaml", &[]);
    let mut run = harness.run(&["--page"]);
    let url = url(&mut run).await;
    let mut browser = Browser::start().await;
    browser
        .before_pages(
            "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective))",
        )
        .await;
    browser.open(&url).await;
    browser.value("window.same = true").await;
    browser
        .until("document.getElementById('connection').textContent === 'Live'")
        .await;
    let before = browser.value(TURNS).await.as_i64().unwrap();
    browser.until(&format!("{TURNS} >= {}", before + 2)).await;
    browser
        .until("document.getElementById('turns/default/scout').textContent.includes('completed: sleep')")
        .await;
    browser.value("document.querySelector('details').open = true").await;
    browser.until(&format!("{TURNS} >= {}", before + 3)).await;
    assert_eq!(browser.value("window.same").await, true, "it was loaded again");
    assert_eq!(browser.value("document.querySelector('details').open").await, true);
    assert_eq!(
        browser
            .value("document.getElementById('budgets').querySelectorAll('tbody tr').length")
            .await,
        1
    );

    // What a text from outside could bring: the policy refuses it even in markup.
    let injected = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')";
    browser.value(injected).await;
    browser.value("fetch('http://127.0.0.1:9/').catch(() => 1)").await;
    let refused = "new Promise(done => {
        const look = () => { if (refused.length >= 3) done(refused.sort()); };
        addEventListener('securitypolicyviolation', look);
        look();
    })";
    let expected = json!(["connect-src", "img-src", "script-src-attr"]);
    assert_eq!(browser.value(refused).await, expected, "and nothing of the page itself");
    assert_eq!(browser.value("window.ran").await, Value::Null);

    run.interrupt().await;
    let ended = "document.getElementById('connection').textContent.startsWith('Ended on request.')";
    browser.until(ended).await;
    assert_eq!(run.cause().await, "Interrupted");
}

#[tokio::test]
async fn the_page_shows_no_text_of_the_model_and_the_next_run_shows_the_turns_of_this_one() {
    let mut harness = LocalHarness::new();
    let turns = various(&json!({ "yield": { "sleep": 3600, "reason": CANARY } }));
    harness.write("all.yaml", &scripted("sleeper", &turns));
    let mut urls = Vec::new();
    for _ in 0..2 {
        let mut run = harness.run(&["--page", "127.0.0.1:0"]);
        let url = url(&mut run).await;
        run.until("sleeper", "asleep", |line| line["state"] == "Sleeping").await;
        // The page is written before the line, and has the events of the turn from this run or from the journal.
        let (status, body) = get(&url);
        assert_eq!(status, 200);
        assert!(
            body.contains("completed: sleep") && body.contains("model:call_started"),
            "{body}"
        );
        assert!(!body.contains(CANARY), "{body}");
        let other = url.trim_end_matches('/').to_owned() + "0/";
        assert_eq!(get(&other).0, 403);
        run.interrupt().await;
        assert_eq!(run.cause().await, "Interrupted");
        urls.push(url);
    }
    assert_ne!(
        urls[0].rsplit('/').nth(1),
        urls[1].rsplit('/').nth(1),
        "the token is new"
    );
}

#[tokio::test]
async fn without_the_flag_there_is_no_page_and_an_address_in_use_starts_nothing() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &scripted("once", &json!([{ "yield": { "mode": "shutdown" } }])),
    );
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let mut run = harness.run_with(&[], &[("AGENTLOOP_PAGE_ADDRESS", &address)]);
    assert_eq!(run.ended().await.code(), Some(2));
    let expected = format!("--page: {address} cannot be used");
    assert!(run.err().contains(&expected), "{}", run.err());
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert!(run.lines().iter().all(|line| line["type"] != "page"), "{}", run.out());
}
