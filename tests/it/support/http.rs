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
pub fn exchange(connection: impl Read + Write, head: &str, body: &str) -> (u16, String) {
    try_exchange(connection, head, body).expect("the server reads and answers")
}

/// The same with a server that may end, or be cut off, in the middle.
pub fn try_exchange(mut connection: impl Read + Write, head: &str, body: &str) -> std::io::Result<(u16, String)> {
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    let cut = || std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "an answer without head or status");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(cut)?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.ok_or_else(cut)?, body.to_owned()))
}
