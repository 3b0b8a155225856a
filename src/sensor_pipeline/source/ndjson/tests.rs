//! Tests of the lines by tables, and of streams on loopback, written byte by byte.

use proptest::prelude::*;
use rstest::rstest;
use tokio::io::AsyncWriteExt;

use super::*;
use crate::source::ArrivalOutcome;
use crate::source::test_server::{check_idle_timeout, next, server, target};

const SOON: Duration = Duration::from_secs(20);
const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";

fn lines(text: &str) -> Vec<String> {
    let lines = LineBuffer::new(20).push(text.as_bytes());
    lines.into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
}

#[rstest]
#[case::two("1\n{\"a\": 2}\n", &["1", "{\"a\": 2}"])]
#[case::with_returns("1\r\n2\r\n", &["1", "2"])]
#[case::empty_ones("\n\n1\n \r\n2\n", &["1", "2"])]
#[case::not_ended("1\n2", &["1"])]
#[case::of_the_allowed_length("01234567890123456789\n", &["01234567890123456789"])]
#[case::one_byte_longer("012345678901234567890\n1\n", &["012345678901234567890", "1"])]
#[case::much_longer("0123456789012345678901234567890123456789\n1\n", &["012345678901234567890", "1"])]
fn each_line_that_ends_is_an_event_and_at_most_a_byte_too_long(#[case] text: &str, #[case] expected: &[&str]) {
    assert_eq!(lines(text), expected);
}

proptest! {
    #[test]
    fn where_a_stream_is_cut_changes_nothing(
        pieces in proptest::collection::vec(prop_oneof!["[a-z]{0,30}", Just("\n".into()), Just("\r\n".into())], 0..20),
        cut in 1_usize..40,
    ) {
        let text = pieces.concat();
        let mut buffer = LineBuffer::new(20);
        let cut: Vec<_> = text.as_bytes().chunks(cut).flat_map(|piece| buffer.push(piece)).collect();
        prop_assert!(buffer.line.len() <= 21);
        prop_assert!(cut.iter().all(|line| line.len() <= 21));
        prop_assert_eq!(cut, LineBuffer::new(20).push(text.as_bytes()));
    }
}

#[tokio::test]
async fn equal_lines_are_two_events_and_a_line_that_cannot_be_stored_ends_the_connection() {
    let (url, mut connections) = server().await;
    let (feed, mut arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let listener = NdjsonListener {
        place: target(&url),
        idle: SOON,
    };
    let task = tokio::spawn(listener.run(feed));
    let (mut stream, head) = connections.recv().await.unwrap();
    assert!(head.contains("accept: application/x-ndjson"), "{head}");
    stream
        .write_all(format!("{HEAD}{{\"a\":1}}\n{{\"a\":1}}\n3\n").as_bytes())
        .await
        .unwrap();
    for _ in 0..2 {
        let message = next(&mut arrivals, ArrivalOutcome::OnDisk).await;
        assert_eq!(
            (message.repeat, message.payload),
            (RepeatRule::Never, b"{\"a\":1}".to_vec())
        );
    }
    next(&mut arrivals, ArrivalOutcome::NotNow).await;
    let failed = condition.wait_for(|condition| condition.failures == 1).await.unwrap();
    let failure = failed.failure.clone();
    drop(failed);
    assert_eq!(
        failure.as_deref(),
        Some("cannot store incoming events; check the sensor pod's storage")
    );
    let (mut stream, _) = connections.recv().await.unwrap();
    stream.write_all(format!("{HEAD}4\n").as_bytes()).await.unwrap();
    assert_eq!(next(&mut arrivals, ArrivalOutcome::OnDisk).await.payload, b"4");
    task.abort();
}

#[tokio::test]
async fn an_empty_line_resets_the_idle_timeout_and_silence_ends_the_connection() {
    check_idle_timeout(HEAD, "\n", |url, idle, feed| {
        let place = target(url);
        NdjsonListener { place, idle }.run(feed)
    })
    .await;
}

#[rstest]
#[case::a_page(
    "HTTP/1.1 200 OK\r\ncontent-type: text/html; charset=utf-8\r\ncontent-length: 0\r\n\r\n",
    "the response is an HTML page; check url"
)]
#[case::gone(
    "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "the server answers with status 404; check url"
)]
#[tokio::test]
async fn a_response_that_is_no_stream_is_a_failure(#[case] answer: &str, #[case] expected: &str) {
    let (url, mut connections) = server().await;
    let (feed, _arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let listener = NdjsonListener {
        place: target(&url),
        idle: SOON,
    };
    let task = tokio::spawn(listener.run(feed));
    let (mut stream, _) = connections.recv().await.unwrap();
    stream.write_all(answer.as_bytes()).await.unwrap();
    let failed = condition.wait_for(|condition| condition.failures == 1).await.unwrap();
    assert_eq!(failed.failure.as_deref(), Some(expected));
    drop(failed);
    task.abort();
}
