//! One plain HTTP request to this machine, for servers that need no TLS.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::TcpStream;

/// Sends a request to `address` (`host:port`) and gives the status and the body.
pub fn request(address: &str, method: &str, path: &str, content_type: &str, body: &str) -> (u16, String) {
    let connection = TcpStream::connect(address).expect("the server listens");
    let head = format!("{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: {content_type}\r\n");
    exchange(connection, &head, body)
}

/// Sends a request over a connection and gives the status and the body; `head` is its lines but for the length. It says
/// HTTP/1.0: then the answer is not chunked and ends with the connection.
pub fn exchange(mut connection: impl Read + Write, head: &str, body: &str) -> (u16, String) {
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes()).expect("the server reads");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("the server answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer has a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (status.expect("an HTTP answer has a status"), body.to_owned())
}
