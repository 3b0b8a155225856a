//! Tests of the parser by tables, and of streams on loopback, written byte by byte.

use proptest::prelude::*;
use rstest::rstest;
use tokio::io::AsyncWriteExt;

use super::*;
use crate::source::ArrivalOutcome;
use crate::source::test_server::{check_idle_timeout, next, server, target};

fn event(data: &str, id: Option<&str>, last_id: Option<&str>) -> SseEvent {
    SseEvent {
        data: data.into(),
        id: id.map(Into::into),
        last_id: last_id.map(Into::into),
    }
}

fn parsed(text: &str) -> Vec<SseEvent> {
    SseParser::new(20, None).push(text.as_bytes())
}

#[rstest]
#[case::plain("data: a\n\n", &[("a", None, None)])]
#[case::without_a_space("data:a\n\n", &[("a", None, None)])]
#[case::lines("data: a\ndata:\ndata: b\n\n", &[("a\n\nb", None, None)])]
#[case::returns("data: a\r\rdata: b\r\n\r\n", &[("a", None, None), ("b", None, None)])]
#[case::comments(": hi\n\n:\n\ndata: a\n\n", &[("a", None, None)])]
#[case::an_id_stays("id: 1\ndata: a\n\ndata: b\n\n", &[("a", Some("1"), Some("1")), ("b", None, Some("1"))])]
#[case::an_id_alone("id: 1\n\ndata: b\n\n", &[("b", None, Some("1"))])]
#[case::an_id_is_forgotten("id: 1\ndata: a\n\nid\ndata: b\n\n", &[("a", Some("1"), Some("1")), ("b", None, None)])]
#[case::an_id_with_a_zero("id: \0\ndata: a\n\n", &[("a", None, None)])]
#[case::an_id_with_a_control_character("id: \x01\ndata: a\n\n", &[("a", None, None)])]
#[case::an_id_with_a_delete_character("id: 1\ndata: a\n\nid: \x7f\ndata: b\n\n", &[("a", Some("1"), Some("1")), ("b", None, Some("1"))])]
#[case::other_fields("event: x\nfoo: y\ndata: a\n\n", &[("a", None, None)])]
#[case::a_mark("\u{feff}data: a\n\n", &[("a", None, None)])]
#[case::not_ended("data: a\n", &[])]
#[case::of_the_allowed_length("data: 01234567890123456789\n\n", &[("01234567890123456789", None, None)])]
#[case::too_long("data: 012345678901234567890123456789\n\n", &[("012345678901234567890", None, None)])]
#[case::too_long_in_lines("data: 01234567890\ndata: 0123456789\n\ndata: b\n\n", &[("01234567890\n012345678", None, None), ("b", None, None)])]
fn a_stream_is_parsed_according_to_its_standard(
    #[case] text: &str,
    #[case] events: &[(&str, Option<&str>, Option<&str>)],
) {
    let events: Vec<_> = events.iter().map(|(data, id, last)| event(data, *id, *last)).collect();
    assert_eq!(parsed(text), events);
}

#[test]
fn the_server_sets_the_retry_delay() {
    let mut parser = SseParser::new(20, None);
    assert!(parser.push(b"retry: 1500\nretry: x\n\n").is_empty());
    assert_eq!(parser.retry, Some(Duration::from_millis(1500)));
}

#[rstest]
#[case(0, 1_000)]
#[case(999, 1_000)]
#[case(1_500, 1_500)]
#[case(300_001, 300_000)]
#[case(u64::MAX, 300_000)]
fn a_retry_delay_is_at_least_a_second_and_at_most_five_minutes(#[case] asked: u64, #[case] waited: u64) {
    let mut parser = SseParser::new(20, None);
    assert_eq!(parser.pause(), None);
    parser.push(format!("retry: {asked}\n\n").as_bytes());
    assert_eq!(parser.pause(), Some(Duration::from_millis(waited)));
}

proptest! {
    #[test]
    fn it_does_not_matter_how_a_stream_is_cut(
        lines in proptest::collection::vec("(data|id|retry|event)?:? ?[a-z]{0,30}(\n|\r|\r\n)", 0..30),
        cut in 1_usize..40,
    ) {
        let text = lines.concat();
        let mut parser = SseParser::new(20, None);
        let pieces: Vec<_> = text.as_bytes().chunks(cut).flat_map(|piece| parser.push(piece)).collect();
        prop_assert!(pieces.iter().all(|event| event.data.len() <= 21));
        prop_assert_eq!(pieces, parsed(&text));
    }

    #[test]
    fn no_bytes_make_it_keep_more_than_an_event(bytes in proptest::collection::vec(any::<u8>(), 0..5_000)) {
        let mut parser = SseParser::new(20, None);
        parser.push(&bytes);
        prop_assert!(parser.line.len() <= MAX_ID + NAME_ROOM + 1);
        prop_assert!(parser.data.is_none_or(|data| data.len() <= 21));
    }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

fn listener(url: &str, idle: Duration) -> SseListener {
    SseListener {
        place: target(url),
        idle,
    }
}

#[tokio::test]
async fn a_stream_continues_after_the_last_event_that_is_on_disk() {
    let (url, mut connections) = server().await;
    let (feed, mut arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let cursor = SourceCursor {
        last_event_id: Some("6".into()),
        ..SourceCursor::default()
    };
    let task = tokio::spawn(listener(&url, Duration::from_secs(20)).run(cursor, feed));
    let (mut stream, head) = connections.recv().await.unwrap();
    assert!(head.contains("last-event-id: 6\r\n"), "{head}");
    let events = format!("{HEAD}retry: 10\n\nid: 7\ndata: a\n\nid: 8\ndata: b\n\nid: 9\ndata: c\n\n");
    stream.write_all(events.as_bytes()).await.unwrap();
    let first = next(&mut arrivals, ArrivalOutcome::OnDisk).await;
    assert_eq!(
        (first.id.as_deref(), first.payload.as_slice()),
        (Some("7"), b"a".as_slice())
    );
    next(&mut arrivals, ArrivalOutcome::Dropped).await;
    // The third event cannot be stored, so it is received again.
    next(&mut arrivals, ArrivalOutcome::NotNow).await;
    condition.wait_for(|condition| condition.failures == 1).await.unwrap();
    let (mut stream, head) = connections.recv().await.unwrap();
    assert!(head.contains("last-event-id: 8\r\n"), "{head}");
    stream.write_all(format!("{HEAD}data: d\n\n").as_bytes()).await.unwrap();
    let last = next(&mut arrivals, ArrivalOutcome::OnDisk).await;
    assert_eq!((last.id, last.cursor.last_event_id.as_deref()), (None, Some("8")));
    task.abort();
}

#[tokio::test]
async fn silence_ends_a_connection_and_a_comment_is_no_silence() {
    check_idle_timeout(HEAD, ":\n\n", |url, idle, feed| {
        listener(url, idle).run(SourceCursor::default(), feed)
    })
    .await;
}

#[rstest]
#[case::a_page(
    "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n",
    "the response is not a stream of server-sent events; check url"
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
    let task = tokio::spawn(listener(&url, Duration::from_secs(20)).run(SourceCursor::default(), feed));
    let (mut stream, _) = connections.recv().await.unwrap();
    stream.write_all(answer.as_bytes()).await.unwrap();
    let failed = condition.wait_for(|condition| condition.failures == 1).await.unwrap();
    assert_eq!(failed.failure.as_deref(), Some(expected));
    drop(failed);
    task.abort();
}
