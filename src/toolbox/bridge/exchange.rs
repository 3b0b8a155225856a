//! Which message of the server answers which request of the clients. Pure.
//!
//! Clients choose the ids of their requests, and a client that was restarted begins again with the same ones. The server
//! therefore sees ids of the bridge, so that a late answer never reaches a later request.

use std::collections::{HashMap, VecDeque};

use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::message::{self, RpcMessage};

/// Maximum number of requests without an answer.
pub(super) const MAX_PENDING: usize = 256;
/// Maximum number of messages that wait to be sent with one answer. A server that notifies faster than its client reads loses
/// notifications, never the answer.
const MAX_QUEUED: usize = 64;
/// Maximum number of notifications that wait for a client to open its stream.
const MAX_BACKLOG: usize = 64;
const METHOD_NOT_FOUND: i32 = -32601;
const LISTEN: &str = "subscriptions/listen";

/// What a client receives for its request.
#[derive(Debug)]
pub(super) enum ServerReply {
    /// Something before the answer.
    Notice(Vec<u8>),
    Answer(Vec<u8>),
}

#[derive(Debug)]
struct PendingRequest {
    client_id: Box<RawValue>,
    method: String,
    progress_token: Option<Value>,
    replies: mpsc::Sender<ServerReply>,
}

/// The conversation with one process of the server.
#[derive(Debug)]
pub(super) struct ServerExchange {
    /// Names the process for clients of the older revision.
    pub(super) session: String,
    next: u64,
    pending: HashMap<u64, PendingRequest>,
    /// The stream of notifications of a client.
    stream: Option<mpsc::Sender<Vec<u8>>>,
    backlog: VecDeque<Vec<u8>>,
    /// The answer to `initialize`, which a server accepts once.
    initialized: Option<Box<RawValue>>,
    is_confirmed: bool,
    /// Whether the server answered anything.
    has_answered: bool,
}

/// A request that was accepted.
pub(super) struct AcceptedRequest {
    pub(super) number: u64,
    pub(super) line: Vec<u8>,
    pub(super) replies: mpsc::Receiver<ServerReply>,
}

impl ServerExchange {
    pub(super) fn new(session: String) -> Self {
        Self {
            session,
            next: 1,
            pending: HashMap::new(),
            stream: None,
            backlog: VecDeque::new(),
            initialized: None,
            is_confirmed: false,
            has_answered: false,
        }
    }

    /// The answer to `initialize`, if the server gave it before.
    pub(super) fn initialized(&self) -> Option<&RawValue> {
        self.initialized.as_deref()
    }

    pub(super) fn is_initializing(&self) -> bool {
        self.pending.values().any(|request| request.method == "initialize")
    }

    /// Whether the server may have ended because it was asked for discovery, which older servers do not know.
    pub(super) fn ended_by_discovery(&self) -> bool {
        let mut pending = self.pending.values();
        !self.has_answered && pending.any(|request| request.method == "server/discover")
    }

    /// Accepts a request; `None` if too many have no answer.
    pub(super) fn request(&mut self, mut request: RpcMessage) -> Option<AcceptedRequest> {
        let (Some(client_id), Some(method)) = (request.id.take(), request.method.clone()) else {
            return None;
        };
        if self.pending.len() >= MAX_PENDING {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let (sender, replies) = mpsc::channel(MAX_QUEUED);
        let pending = PendingRequest {
            client_id,
            method,
            progress_token: request.routing().meta.progress_token,
            replies: sender,
        };
        self.pending.insert(number, pending);
        request.id = message::number(number);
        let line = request.to_line();
        Some(AcceptedRequest { number, line, replies })
    }

    /// A client no longer waits. Returns the line that cancels the request at the server.
    pub(super) fn abandon(&mut self, number: u64) -> Option<Vec<u8>> {
        let pending = self.pending.remove(&number)?;
        // The protocol forbids cancelling it.
        if pending.method == "initialize" {
            return None;
        }
        let params = serde_json::json!({"requestId": number, "reason": "the client closed the request"});
        Some(notification("notifications/cancelled", &params).to_line())
    }

    /// A notification or answer of a client. Returns the line for the server, if there is any.
    pub(super) fn notify(&mut self, mut message: RpcMessage) -> Option<Vec<u8>> {
        if message.is("notifications/initialized") && std::mem::replace(&mut self.is_confirmed, true) {
            return None;
        }
        if message.is("notifications/cancelled") {
            let wanted = message.routing().request_id?;
            let found = self
                .pending
                .iter()
                .find(|(_, request)| request.client_id.get() == wanted.get());
            let number = *found?.0;
            // Parameters of another form name no request: the client is the model, or whoever reaches the socket.
            let mut params: Map<String, Value> = serde_json::from_str(message.params.as_deref()?.get()).ok()?;
            params.insert("requestId".into(), number.into());
            message.params = serde_json::value::to_raw_value(&params).ok();
        }
        Some(message.to_line())
    }

    /// Opens the stream of notifications, in place of an earlier one.
    pub(super) fn open_stream(&mut self) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel(MAX_BACKLOG);
        for message in self.backlog.drain(..) {
            // The channel has room for all of them.
            let _ = sender.try_send(message);
        }
        self.stream = Some(sender);
        receiver
    }

    /// Takes a message of the server. Returns the line that answers it, if the bridge answers it itself.
    pub(super) fn receive(&mut self, message: RpcMessage) -> Option<Vec<u8>> {
        if message.is_request() {
            return self.server_request(message);
        }
        if message.is_notification() {
            self.server_notification(message);
        } else {
            self.answer(message);
        }
        None
    }

    fn answer(&mut self, mut message: RpcMessage) {
        let number = message.id.as_ref().and_then(|id| id.get().parse().ok());
        let Some(pending) = number.and_then(|number: u64| self.pending.remove(&number)) else {
            return;
        };
        self.has_answered = true;
        if pending.method == "initialize" {
            self.initialized.clone_from(&message.result);
        }
        if pending.method == LISTEN {
            message.set_subscription(&pending.client_id);
        }
        message.id = Some(pending.client_id);
        let bytes = message.to_bytes();
        if let Err(mpsc::error::TrySendError::Full(reply)) = pending.replies.try_send(ServerReply::Answer(bytes)) {
            // The client is slow. The answer waits for it as long as the request is open.
            let replies = pending.replies;
            tokio::spawn(async move { replies.send(reply).await });
        }
    }

    fn server_notification(&mut self, mut message: RpcMessage) {
        let routing = message.routing();
        if let Some(id) = routing.meta.subscription_id {
            let number = id.as_u64().or_else(|| id.as_str()?.parse().ok());
            if let Some(pending) = number.and_then(|number| self.pending.get(&number)) {
                message.set_subscription(&pending.client_id);
                let _ = pending.replies.try_send(ServerReply::Notice(message.to_bytes()));
            }
            return;
        }
        if let Some(token) = routing.progress_token {
            let is_its = |request: &&PendingRequest| request.progress_token.as_ref() == Some(&token);
            if let Some(pending) = self.pending.values().find(is_its) {
                let _ = pending.replies.try_send(ServerReply::Notice(message.to_bytes()));
            }
            return;
        }
        self.publish(message.to_bytes());
    }

    /// Sends a message through the stream of notifications; without one, it waits for the next.
    fn publish(&mut self, message: Vec<u8>) {
        let refused = match &self.stream {
            Some(stream) => match stream.try_send(message) {
                Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => return,
                Err(mpsc::error::TrySendError::Closed(message)) => message,
            },
            None => message,
        };
        self.stream = None;
        if self.backlog.len() >= MAX_BACKLOG {
            self.backlog.pop_front();
        }
        self.backlog.push_back(refused);
    }

    /// A request of the server goes to the client, which answers it with the server's id.
    fn server_request(&mut self, message: RpcMessage) -> Option<Vec<u8>> {
        if message.is("ping") {
            let result = serde_json::value::to_raw_value(&serde_json::json!({})).ok();
            let id = message.id;
            return Some(
                RpcMessage {
                    id,
                    result,
                    ..RpcMessage::new()
                }
                .to_line(),
            );
        }
        match &self.stream {
            Some(stream) if !stream.is_closed() => {
                self.publish(message.to_bytes());
                None
            }
            _ => Some(message::error(message.id, METHOD_NOT_FOUND, "the client does not answer requests").to_line()),
        }
    }

    /// Answers a request whose answer was too long to be read.
    pub(super) fn answer_too_long(&mut self, number: u64) {
        let mib = message::MAX_MESSAGE_BYTES / 1024 / 1024;
        let text = format!("it ran, but its result is longer than {mib} MiB and was dropped: ask for less");
        self.answer(message::error(message::number(number), -32603, &text));
    }
}

fn notification(method: &str, params: &Value) -> RpcMessage {
    RpcMessage {
        method: Some(method.to_owned()),
        params: serde_json::value::to_raw_value(params).ok(),
        ..RpcMessage::new()
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::json;

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "it is written in place")]
    fn message(value: Value) -> RpcMessage {
        RpcMessage::parse(value.to_string().as_bytes()).unwrap()
    }

    fn read(line: &[u8]) -> Value {
        serde_json::from_slice(line).unwrap()
    }

    fn exchange() -> ServerExchange {
        ServerExchange::new("s".into())
    }

    fn ask(exchange: &mut ServerExchange, value: Value) -> AcceptedRequest {
        exchange.request(message(value)).unwrap()
    }

    fn next(accepted: &mut AcceptedRequest) -> Option<Value> {
        match accepted.replies.try_recv().ok()? {
            ServerReply::Notice(bytes) | ServerReply::Answer(bytes) => Some(read(&bytes)),
        }
    }

    #[test]
    fn equal_ids_of_two_clients_are_distinguished_and_each_receives_its_answer() {
        let mut exchange = exchange();
        let mut one = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 0, "method": "tools/list"}),
        );
        let mut other = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": "0", "method": "tools/list"}),
        );
        let ids = [&one, &other].map(|accepted| read(&accepted.line)["id"].as_u64().unwrap());
        assert_eq!(ids, [1, 2]);
        exchange.receive(message(json!({"jsonrpc": "2.0", "id": 2, "result": {"a": 2}})));
        exchange.receive(message(json!({"jsonrpc": "2.0", "id": 1, "result": {"a": 1}})));
        assert_eq!(
            next(&mut other),
            Some(json!({"jsonrpc": "2.0", "id": "0", "result": {"a": 2}}))
        );
        assert_eq!(
            next(&mut one),
            Some(json!({"jsonrpc": "2.0", "id": 0, "result": {"a": 1}}))
        );
    }

    #[test]
    fn a_late_answer_to_an_abandoned_request_reaches_no_other_request() {
        let mut exchange = exchange();
        let first = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call"}),
        );
        let cancel = read(&exchange.abandon(first.number).unwrap());
        assert_eq!(
            (&cancel["method"], &cancel["params"]["requestId"]),
            (&json!("notifications/cancelled"), &json!(1))
        );
        let mut second = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call"}),
        );
        exchange.receive(message(json!({"jsonrpc": "2.0", "id": 1, "result": {}})));
        assert_eq!(next(&mut second), None);
        assert_eq!(exchange.abandon(first.number), None, "once");
        let initialize = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 1, "method": "initialize"}),
        );
        assert_eq!(exchange.abandon(initialize.number), None, "the protocol forbids it");
    }

    #[test]
    fn parameters_results_and_errors_pass_byte_for_byte() {
        let mut exchange = exchange();
        let params = r#"{"name":"t", "_meta":{"k":1.0},"n":12345678901234567890123,"e":1e400}"#;
        let request = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{params}}}"#);
        let mut accepted = exchange
            .request(RpcMessage::parse(request.as_bytes()).unwrap())
            .unwrap();
        assert_eq!(
            accepted.line,
            format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{params}}}\n").as_bytes()
        );
        let answer = format!(r#"{{"result":{params},"jsonrpc":"2.0","id":1}}"#);
        exchange.receive(RpcMessage::parse(answer.as_bytes()).unwrap());
        let Ok(ServerReply::Answer(bytes)) = accepted.replies.try_recv() else {
            panic!()
        };
        assert_eq!(
            bytes,
            format!(r#"{{"jsonrpc":"2.0","id":7,"result":{params}}}"#).as_bytes()
        );
    }

    #[test]
    fn progress_and_subscriptions_reach_the_request_they_belong_to() {
        let mut exchange = exchange();
        let meta = json!({"_meta": {"progressToken": 5}});
        let mut call = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": meta}),
        );
        let mut listen = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": 9, "method": "subscriptions/listen"}),
        );
        let progress = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 5, "progress": 1}});
        exchange.receive(message(progress.clone()));
        assert_eq!((next(&mut call), next(&mut listen)), (Some(progress), None));
        let changed = |id: Value| json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": {"_meta": {SUBSCRIPTION: id}}});
        exchange.receive(message(changed(json!(listen.number))));
        assert_eq!((next(&mut call), next(&mut listen)), (None, Some(changed(json!(9)))));
        exchange.receive(message(
            json!({"jsonrpc": "2.0", "id": listen.number, "result": {"_meta": {SUBSCRIPTION: listen.number}}}),
        ));
        assert_eq!(
            next(&mut listen),
            Some(json!({"jsonrpc": "2.0", "id": 9, "result": {"_meta": {SUBSCRIPTION: 9}}}))
        );
    }
    const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

    #[test]
    fn a_cancellation_names_the_request_by_the_servers_id() {
        let mut exchange = exchange();
        let call = ask(
            &mut exchange,
            json!({"jsonrpc": "2.0", "id": "x", "method": "tools/call"}),
        );
        let cancel = |id: Value| {
            message(
                json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "r"}}),
            )
        };
        let line = read(&exchange.notify(cancel(json!("x"))).unwrap());
        assert_eq!(line["params"], json!({"requestId": call.number, "reason": "r"}));
        assert_eq!(exchange.notify(cancel(json!(1))), None, "an unknown request");
        // The first of a list is read as the first field.
        for params in [json!(["x"]), json!("x"), json!(1)] {
            let other = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
            assert_eq!(exchange.notify(message(other)), None, "{params}");
        }
    }

    #[test]
    fn notifications_wait_for_a_stream_up_to_a_bound_and_the_server_is_confirmed_once() {
        let mut exchange = exchange();
        for number in 0..=MAX_BACKLOG {
            exchange.receive(message(
                json!({"jsonrpc": "2.0", "method": "notifications/x", "params": {"n": number}}),
            ));
        }
        let mut stream = exchange.open_stream();
        let first = read(&stream.try_recv().unwrap());
        assert_eq!(first["params"]["n"], 1, "the oldest was dropped");
        let confirm = || message(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        assert!(exchange.notify(confirm()).is_some());
        assert!(exchange.notify(confirm()).is_none());
    }

    #[test]
    fn requests_of_the_server_are_sent_to_the_stream_and_refused_without_one() {
        let mut exchange = exchange();
        let ask = || message(json!({"jsonrpc": "2.0", "id": "s1", "method": "roots/list"}));
        let refusal = read(&exchange.receive(ask()).unwrap());
        assert_eq!(
            (&refusal["id"], &refusal["error"]["code"]),
            (&json!("s1"), &json!(METHOD_NOT_FOUND))
        );
        let mut stream = exchange.open_stream();
        assert!(exchange.receive(ask()).is_none());
        assert_eq!(read(&stream.try_recv().unwrap())["id"], "s1");
        let pong = exchange
            .receive(message(json!({"jsonrpc": "2.0", "id": 4, "method": "ping"})))
            .unwrap();
        assert_eq!(read(&pong), json!({"jsonrpc": "2.0", "id": 4, "result": {}}));
    }

    #[test]
    fn at_most_the_maximum_of_requests_may_be_open() {
        let mut exchange = exchange();
        let request = |id: usize| message(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call"}));
        let open: Vec<_> = (0..MAX_PENDING)
            .map(|id| exchange.request(request(id)).unwrap())
            .collect();
        assert!(exchange.request(request(0)).is_none());
        exchange.abandon(open[0].number);
        assert!(exchange.request(request(0)).is_some());
    }

    #[test]
    fn a_body_that_is_not_one_message_is_rejected() {
        for text in [
            "",
            "[]",
            "{}",
            "1",
            r#"{"jsonrpc":"1.0","id":1}"#,
            r#"{"jsonrpc":"2.0","id":1,"id":2}"#,
            r#"{"jsonrpc":"2.0"}"#,
        ] {
            assert!(RpcMessage::parse(text.as_bytes()).is_none(), "{text}");
        }
    }
}
