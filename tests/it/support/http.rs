//! One plain HTTP request to this machine, for servers that need no TLS.
#![allow(dead_code)]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

/// Sends a request to `address` (`host:port`) and gives the status and the body.
pub fn request(address: &str, method: &str, path: &str, content_type: &str, body: &str) -> (u16, String) {
    let mut connection = TcpStream::connect(address).expect("the server listens");
    let length = body.len();
    // HTTP/1.0: the answer is not chunked and ends with the connection.
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes()).expect("the server reads");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("the server answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer has a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (status.expect("an HTTP answer has a status"), body.to_owned())
}
