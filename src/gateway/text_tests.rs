//! The messages of failed calls and of the gateway's errors, as users read them.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agentloop_texts::TextRows;
use jiff::Timestamp;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use strum::EnumCount;

use super::GatewayError;
use super::failures::{failure_from_error, failure_from_status};
use super::link_state::{LinkRefusal, LinkState, LinkView};
use super::model_field::ModelField;
use super::request::RequestError;
use super::store::{CallStoreError, schema};
use crate::link::messages::Directives;
use crate::provider::reported_error::ReportedError;
use crate::support::clock::ClockReading;

/// The error for a record that cannot be opened for this reason.
fn cannot_open(code: rusqlite::ErrorCode) -> CallStoreError {
    let error = rusqlite::ffi::Error { code, extended_code: 0 };
    schema::cannot_open(
        Path::new("/state/gateway/calls.db"),
        rusqlite::Error::SqliteFailure(error, None),
    )
}

fn from_statuses() -> TextRows {
    let cases = [
        (400, ""),
        (400, r#"{"error": {"message": "your credit balance is too low"}}"#),
        (400, r#"{"error": {"code": "context_length_exceeded"}}"#),
        (401, ""),
        (402, ""),
        (404, ""),
        (413, ""),
        (429, ""),
        (429, r#"{"error": {"code": "insufficient_quota"}}"#),
        (302, ""),
        (500, ""),
    ];
    let row = |(status, body): (u16, &str)| {
        let status = StatusCode::from_u16(status).unwrap();
        let answer = (status, &HeaderMap::new());
        let failure = failure_from_status(ModelField::Main, answer, body.as_bytes(), Timestamp::UNIX_EPOCH);
        text!("Answers of model servers", failure.kind, failure.message)
    };
    cases.map(row).into()
}

fn from_errors() -> TextRows {
    let codes = [
        "context_length_exceeded",
        "insufficient_quota",
        "invalid_api_key",
        "invalid_prompt",
        "model_not_found",
        "rate_limit_exceeded",
        "server_error",
    ];
    let row = |code: &str| {
        let body = format!(r#"{{"error": {{"code": "{code}"}}}}"#);
        let failure = failure_from_error(ModelField::Light, &ReportedError::from_body(body.as_bytes()));
        text!("Errors within answers", failure.kind, failure.message)
    };
    codes.map(row).into()
}

fn refused_requests() -> TextRows {
    let errors = [
        RequestError::NotAnObject,
        RequestError::OtherModel,
        RequestError::Unknown("logprobs".into()),
        RequestError::Refused("n"),
        RequestError::NotYours("stream"),
        RequestError::Disguised,
        RequestError::NotText("messages"),
        RequestError::Image,
        RequestError::ServerTool,
        RequestError::Malformed("messages"),
        RequestError::AnswerSchema(40_000),
        RequestError::TooLong {
            bytes: 900_000,
            max: 512_000,
        },
    ];
    assert_eq!(errors.len(), RequestError::COUNT, "each variant needs an example");
    let name = |error: &RequestError| {
        let text = format!("{error:?}");
        text.split(['(', '{', ' ']).next().unwrap_or_default().to_owned()
    };
    let row = |error: RequestError| {
        let section = "Refused requests of the worker";
        text!(section, name(&error), error.message(ModelField::Main))
    };
    errors.map(row).into()
}

fn without_link() -> TextRows {
    let fenced = LinkView {
        fenced: true,
        ..LinkView::default()
    };
    let suspended = LinkView {
        directives: Directives {
            suspend: true,
            ..Directives::default()
        },
        ..LinkView::default()
    };
    let lost = LinkState::new(Duration::ZERO, ClockReading::now()).refusal(ClockReading::now());
    let Some(LinkRefusal::LinkLost(lost)) = lost else {
        panic!("{lost:?}");
    };
    let failures = [fenced.stop().unwrap(), suspended.stop().unwrap(), lost];
    failures
        .map(|failure| text!("Calls that are not sent", failure.kind, failure.message))
        .into()
}

#[test]
fn the_texts_of_the_gateway() {
    let mut rows = from_statuses();
    rows.extend(from_errors());
    rows.extend(without_link());
    rows.extend(refused_requests());
    let path = PathBuf::from("/state/gateway/calls.db");
    rows.extend(variants!(
        "The call store",
        [
            cannot_open(rusqlite::ErrorCode::DatabaseCorrupt),
            cannot_open(rusqlite::ErrorCode::DatabaseLocked),
            cannot_open(rusqlite::ErrorCode::DiskFull),
            cannot_open(rusqlite::ErrorCode::PermissionDenied),
            CallStoreError::Version {
                path,
                found: 9,
                known: 5,
            },
            CallStoreError::Write(rusqlite::Error::QueryReturnedNoRows),
        ]
    ));
    let socket = GatewayError::Socket {
        path: "/run/agentloop/gateway.sock".into(),
        source: io::ErrorKind::AddrInUse.into(),
    };
    rows.push(text!("Start", "Socket", socket));
    assert_texts!("gateway", "Failed calls and errors of the gateway", rows);
}
