//! The page over real connections: who may read it, what each response says, and what readers cost.

use std::net::SocketAddr;

use pretty_assertions::assert_eq;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

use super::*;
use crate::page::agent_rows::AgentRow;
use crate::page::html::parts;
use crate::page::recent::AgentHistory;
use crate::page::view::{AgentView, PageView};

const TOKEN: &str = "0123abcd";
const SOON: Duration = Duration::from_secs(10);
/// Bytes of the buffers of both ends of a connection.
const BUFFER: u32 = 64 * 1024;

struct Served {
    address: SocketAddr,
    content: watch::Sender<PageContent>,
}

fn served(limits: HttpLimits) -> Served {
    let socket = TcpSocket::new_v4().unwrap();
    // Connections have it from their listener: little fits into a connection that is not read.
    socket.set_send_buffer_size(BUFFER).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    let content = watch::Sender::default();
    show(&content, &["a", "b"], 0);
    let router = router(TOKEN, TimeZone::UTC, content.clone());
    tokio::spawn(crate::telemetry::http::serve(listener, router, limits));
    Served { address, content }
}

/// Agents of these names, the first of which has completed `turns` turns.
fn show(content: &watch::Sender<PageContent>, names: &[&str], turns: i64) {
    let agents = names.iter().enumerate().map(|(place, name)| AgentView {
        row: AgentRow {
            namespace: "n".into(),
            agent: (*name).into(),
            turns: (turns, if place == 0 { turns } else { 0 }),
            ..AgentRow::default()
        },
        history: Some(AgentHistory::default()),
        ..AgentView::default()
    });
    let view = PageView {
        agents: agents.collect(),
        ..PageView::default()
    };
    content.send_modify(|content| content.parts = Arc::new(parts(&view, &TimeZone::UTC)));
}

impl Served {
    async fn send(&self, request: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(BUFFER).unwrap();
        let mut connection = socket.connect(self.address).await.unwrap();
        connection.write_all(request.as_bytes()).await.unwrap();
        connection
    }

    /// The whole response to a request with this first line and this host.
    async fn ask(&self, line: &str, host: &str) -> String {
        rest(self.send(&format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await).await
    }

    async fn status(&self, line: &str, host: &str) -> u16 {
        status(&self.ask(line, host).await)
    }

    /// A stream of which nothing was read yet.
    async fn stream(&self) -> TcpStream {
        self.send(&format!("GET /{TOKEN}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
            .await
    }
}

async fn rest(mut connection: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = timeout(SOON, connection.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Reads until the text contains this.
async fn until(connection: &mut TcpStream, words: &str) -> String {
    let mut text = String::new();
    let mut piece = vec![0; 64 * 1024];
    while !text.contains(words) {
        let length = timeout(SOON, connection.read(&mut piece)).await.unwrap().unwrap();
        assert!(length > 0, "it ended without {words}: {text}");
        text += std::str::from_utf8(&piece[..length]).unwrap();
    }
    text
}

#[tokio::test]
async fn no_request_is_answered_without_the_token() {
    let server = served(LIMITS);
    let wrong = TOKEN.replace('d', "e");
    for path in [
        "/".to_owned(),
        "/events".into(),
        format!("/{TOKEN}"),
        format!("/{wrong}/"),
        format!("/{wrong}/events"),
        format!("/{}/", &TOKEN[1..]),
        format!("/{TOKEN}0/"),
        format!("//{TOKEN}/"),
        format!("/?{TOKEN}/"),
        "/none/none".into(),
    ] {
        for method in ["GET", "HEAD", "POST"] {
            let answer = server.ask(&format!("{method} {path}"), "127.0.0.1").await;
            assert_eq!(status(&answer), 403, "{method} {path}");
            assert!(!answer.contains(TOKEN) && !answer.contains("<html"), "{answer}");
        }
    }
    assert_eq!(server.status(&format!("GET /{TOKEN}/"), "127.0.0.1").await, 200);
}

#[tokio::test]
async fn only_addresses_and_localhost_are_hosts() {
    let server = served(LIMITS);
    let line = format!("GET /{TOKEN}/");
    for host in [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost:9",
        "LocalHost",
        "[::1]:80",
        "192.0.2.1",
    ] {
        assert_eq!(server.status(&line, host).await, 200, "{host}");
    }
    for host in [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "a@127.0.0.1",
        "",
    ] {
        assert_eq!(server.status(&line, host).await, 421, "{host}");
    }
    let two = format!("{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n");
    assert_eq!(status(&rest(server.send(&two).await).await), 421);
    let none = format!("{line} HTTP/1.0\r\n\r\n");
    assert_eq!(status(&rest(server.send(&none).await).await), 421);
    let absolute = format!("GET http://evil.example/{TOKEN}/");
    assert_eq!(server.status(&absolute, "127.0.0.1").await, 421);
}

#[tokio::test]
async fn all_routes_only_read() {
    let server = served(LIMITS);
    for (line, expected) in [
        ("GET none", 404),
        ("GET events/", 404),
        ("GET ../", 404),
        ("POST ", 405),
        ("DELETE ", 405),
        ("PUT events", 405),
        ("OPTIONS events", 405),
        ("POST none", 404),
    ] {
        let (method, path) = line.split_once(' ').unwrap();
        let answer = server.ask(&format!("{method} /{TOKEN}/{path}"), "127.0.0.1").await;
        assert_eq!(status(&answer), expected, "{line}");
        assert_eq!(answer.contains("allow: GET, HEAD"), expected == 405, "{answer}");
    }
}

#[tokio::test]
async fn a_response_without_its_body_has_the_same_head() {
    let server = served(LIMITS);
    let whole = server.ask(&format!("GET /{TOKEN}/"), "127.0.0.1").await;
    let head = server.ask(&format!("HEAD /{TOKEN}/"), "127.0.0.1").await;
    let dated = |head: &str| {
        head.lines()
            .filter(|line| !line.starts_with("date:"))
            .collect::<Vec<_>>()
            .join("\n")
    };
    let (whole, body) = whole.split_once("\r\n\r\n").unwrap();
    assert_eq!(dated(whole), dated(head.strip_suffix("\r\n\r\n").unwrap()));
    assert!(whole.contains(&format!("content-length: {}", body.len())), "{whole}");
    // It does not wait for the end of a stream.
    let head = server.ask(&format!("HEAD /{TOKEN}/events"), "127.0.0.1").await;
    assert!(
        head.contains("content-type: text/event-stream") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
}

#[tokio::test]
async fn every_response_forbids_other_content_other_sites_and_copies() {
    let server = served(LIMITS);
    for (line, host) in [
        (format!("GET /{TOKEN}/"), "127.0.0.1"),
        (format!("HEAD /{TOKEN}/events"), "127.0.0.1"),
        (format!("GET /{TOKEN}/none"), "127.0.0.1"),
        ("GET /".into(), "127.0.0.1"),
        ("GET /".into(), "evil.example"),
    ] {
        let answer = server.ask(&line, host).await;
        for header in [
            "content-security-policy: default-src 'none'; script-src 'self'",
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "cache-control: no-store",
            "referrer-policy: no-referrer",
            "x-content-type-options: nosniff",
            "cross-origin-resource-policy: same-origin",
            "cross-origin-opener-policy: same-origin",
        ] {
            assert!(answer.contains(header), "{line} of {host} has no {header}: {answer}");
        }
        assert!(!answer.contains("access-control"), "{answer}");
    }
}

#[tokio::test]
async fn the_policy_allows_the_script_and_the_style_of_the_page_and_no_other() {
    let server = served(LIMITS);
    let answer = server.ask(&format!("GET /{TOKEN}/"), "127.0.0.1").await;
    assert!(
        answer.contains("script-src 'self'; style-src 'self';") && !answer.contains("unsafe"),
        "{answer}"
    );
    // What is in the document itself does not run.
    assert!(answer.contains("<script src=\"page.js\" defer></script>") && !answer.contains("<script>"));
    assert!(
        !answer.contains("<style") && !answer.contains(" style=") && !answer.contains(" on"),
        "{answer}"
    );
    for (name, kind, words) in [
        ("page.js", "text/javascript", "EventSource"),
        ("page.css", "text/css", "color-scheme"),
    ] {
        let answer = server.ask(&format!("GET /{TOKEN}/{name}"), "127.0.0.1").await;
        assert!(
            answer.contains(&format!("content-type: {kind}")) && answer.contains(words),
            "{answer}"
        );
        assert_eq!(server.status(&format!("POST /{TOKEN}/{name}"), "127.0.0.1").await, 405);
    }
}

#[tokio::test]
async fn a_stream_begins_with_everything_continues_with_changes_and_ends_with_the_run() {
    let server = served(LIMITS);
    let mut stream = server.stream().await;
    let first = until(&mut stream, "events/n/b").await;
    for id in ["agents", "approvals", "turns/n/a", "events/n/a", "turns/n/b"] {
        assert!(first.contains(&format!("data: {{\"id\":\"{id}\"")), "{id}: {first}");
    }
    show(&server.content, &["a", "b"], 41);
    let next = until(&mut stream, ">41<").await;
    assert_eq!(next.matches("event: part").count(), 1, "{next}");
    server
        .content
        .send_modify(|content| content.ended = Some("No loop is running any more."));
    let last = rest(stream).await;
    assert!(
        last.contains("event: end\ndata: \"No loop is running any more.\"\n\n"),
        "{last}"
    );
}

#[tokio::test]
async fn a_reader_that_is_behind_is_sent_the_newest_state_only() {
    let content = watch::Sender::default();
    let readers = ConnectionLimiter::new(ConnectionBounds::of_strangers(1, 1));
    let slot = readers.take(IpAddr::from([127, 0, 0, 1])).unwrap();
    let reader = PageReader::new(content.subscribe(), slot);
    for turns in 100..1100 {
        show(&content, &["a"], turns);
    }
    let (text, reader) = reader.next().await.unwrap();
    assert_eq!(
        (text.matches("event: part").count(), text.contains(">1099<")),
        (4, true)
    );
    show(&content, &["a"], 1100);
    let (text, _) = reader.unwrap().next().await.unwrap();
    assert!(
        text.contains(">1100<") && text.matches("event: part").count() == 1,
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_changes_has_a_comment_in_time() {
    let content = watch::Sender::default();
    let readers = ConnectionLimiter::new(ConnectionBounds::of_strangers(1, 1));
    let slot = readers.take(IpAddr::from([127, 0, 0, 1])).unwrap();
    let (_, reader) = PageReader::new(content.subscribe(), slot).next().await.unwrap();
    let since = Instant::now();
    let (text, _) = reader.unwrap().next().await.unwrap();
    assert_eq!(
        (text.as_str(), since.elapsed() >= live::KEEP_ALIVE_INTERVAL),
        (":\n\n", true)
    );
}

#[tokio::test]
async fn readers_over_the_bound_are_refused_and_there_is_room_again_when_one_ends() {
    let server = served(LIMITS);
    let mut readers = Vec::new();
    for _ in 0..MAX_READERS {
        let mut stream = server.stream().await;
        until(&mut stream, "events/n/b").await;
        readers.push(stream);
    }
    let line = format!("GET /{TOKEN}/events");
    assert_eq!(server.status(&line, "127.0.0.1").await, 503);
    assert_eq!(
        server.status(&format!("GET /{TOKEN}/"), "127.0.0.1").await,
        200,
        "the page itself"
    );
    readers.pop();
    let deadline = Instant::now() + SOON;
    loop {
        let mut stream = server.stream().await;
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        if &head == b"HTTP/1.1 200" {
            break;
        }
        assert!(Instant::now() < deadline, "never room");
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_is_dropped_and_holds_up_no_other() {
    let server = served(HttpLimits {
        // Long enough for all of them to be served on a slow machine.
        unread: Duration::from_secs(5),
        ..LIMITS
    });
    let mut slow = Vec::new();
    for _ in 1..MAX_READERS {
        slow.push(server.stream().await);
    }
    let mut quick = server.stream().await;
    until(&mut quick, "events/n/b").await;
    // More than the buffers of both ends hold.
    let name = "x".repeat(16 * BUFFER as usize);
    show(&server.content, &[&name], 1001);
    until(&mut quick, ">1001<").await;
    assert_eq!(server.content.receiver_count(), MAX_READERS, "they are given time");
    let deadline = Instant::now() + SOON;
    while server.content.receiver_count() > 1 {
        assert!(Instant::now() < deadline, "never dropped");
        server.status("GET /", "127.0.0.1").await;
    }
    show(&server.content, &["a", "b"], 1002);
    until(&mut quick, ">1002<").await;
    let mut next = server.stream().await;
    assert!(until(&mut next, "\r\n").await.starts_with("HTTP/1.1 200"));
}
