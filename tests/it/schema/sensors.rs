//! Samples for the rules of Sensors.

use serde_json::{Value, json};

use super::budgets::selecting;
use super::samples::{Row, change, row, with};

/// The smallest Sensor: a clock for one Agent.
pub fn sensor() -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Sensor",
        "metadata": {"name": "s"},
        "spec": {
            "agentNames": ["x"],
            "source": {"schedule": {"cron": "0 8 * * 1-5"}},
        },
    })
}

/// `sensor` with a change to its spec.
pub fn spec(change: &Value) -> Value {
    with(sensor(), &json!({"spec": change}))
}

/// A Sensor with this source alone.
pub fn source(source: &Value) -> Value {
    let mut whole = sensor();
    whole["spec"]["source"] = source.clone();
    whole
}

/// One that is sent to, by this name.
fn webhook(change: &Value) -> Value {
    let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "hooks", "key": "main"}});
    source(&json!({"webhook": with(webhook, change)}))
}

fn signal(fields: &Value) -> Value {
    spec(&json!({"signals": [with(json!({"name": "spike"}), fields)]}))
}

/// The rules of Sensors.
pub fn rows() -> Vec<Row> {
    let mut rows = general();
    rows.push(crons());
    rows.extend(pods());
    rows.extend(web_sockets());
    rows.extend(polled_tools());
    rows.extend(tls());
    rows
}

/// The rules of sources that need a pod.
fn pods() -> Vec<Row> {
    let named = |name: &str| with(webhook(&json!({})), &json!({"metadata": {"name": name}}));
    let poll = |poll: &Value| source(&json!({"poll": poll}));
    let page = |http: &Value| poll(&json!({"http": with(json!({"url": "https://example.com/"}), http)}));
    let query = |url: &str| poll(&json!({"prometheus": {"url": url, "query": "up"}}));
    let stream = |url: &str| source(&json!({"stream": {"sse": {"url": url}}}));
    let storage = |storage: &Value| with(webhook(&json!({})), &json!({"spec": {"storage": storage}}));
    let addresses = |of: &dyn Fn(&str) -> Value| {
        let passes = ["http://prices:8080/now", "https://example.com/?a=b"];
        let fails = [
            "ftp://example.com",
            "example.com",
            "HTTPS://example.com",
            " https://example.com",
        ];
        (passes.map(of).to_vec(), fails.map(of).to_vec())
    };
    let (pages, no_pages) = addresses(&|url| page(&json!({"url": url})));
    let (queries, no_queries) = addresses(&query);
    let (streams, no_streams) = addresses(&stream);
    vec![
        row(
            "metadata.name of a Sensor with poll, stream or webhook must be at most 45",
            vec![
                named(&"a".repeat(45)),
                named("a"),
                with(sensor(), &json!({"metadata": {"name": "0.prices"}})),
                with(sensor(), &json!({"metadata": {"name": "a".repeat(46)}})),
            ],
            vec![named(&"a".repeat(46)), named("0-prices"), named("prices.eu")],
        ),
        row(
            "spec.source.poll must have exactly one of http, prometheus and tool",
            vec![page(&json!({})), query("http://prometheus:9090")],
            vec![
                poll(&json!({"intervalSeconds": 5})),
                poll(&json!({
                    "http": {"url": "https://example.com/"}, "prometheus": {"url": "http://prometheus:9090", "query": "up"},
                })),
            ],
        ),
        row("spec.source.poll.http.url must start with http", pages, no_pages),
        row(
            "spec.source.poll.http.body requires method: POST",
            vec![
                page(&json!({"method": "POST", "body": "{}"})),
                page(&json!({"method": "POST"})),
            ],
            vec![
                page(&json!({"body": "{}"})),
                page(&json!({"method": "GET", "body": "{}"})),
            ],
        ),
        row(
            "spec.source.poll.prometheus.url must start with http",
            queries,
            no_queries,
        ),
        row("spec.source.stream.sse.url must start with http", streams, no_streams),
        row(
            "spec.source.webhook.deliveryIDHeader is supported with scheme GitHub only",
            vec![
                webhook(&json!({"deliveryIDHeader": "X-Gitea-Delivery"})),
                webhook(&json!({"scheme": "StandardWebhooks"})),
            ],
            vec![webhook(
                &json!({"scheme": "StandardWebhooks", "deliveryIDHeader": "X-Gitea-Delivery"}),
            )],
        ),
        row(
            "spec.storage.size must be a quantity of at least 32Mi",
            vec![storage(&json!({"size": "32Mi"})), storage(&json!({"size": "1Gi"}))],
            vec![storage(&json!({"size": "31Mi"})), storage(&json!({"size": "a lot"}))],
        ),
        change(
            "spec.storage is immutable",
            storage(&json!({"size": "64Mi"})),
            vec![storage(&json!({"size": "64Mi", "ephemeral": false}))],
            vec![
                storage(&json!({"size": "65Mi"})),
                storage(&json!({"size": "64Mi", "ephemeral": true})),
                webhook(&json!({})),
            ],
        ),
    ]
}

/// The rules of streams of messages.
fn web_sockets() -> Vec<Row> {
    let stream = |stream: &Value| source(&json!({"stream": stream}));
    let socket = |url: &str| stream(&json!({"webSocket": {"url": url, "subscribe": "{\"op\": \"subscribe\"}"}}));
    let lines = |url: &str| stream(&json!({"ndjson": {"url": url}}));
    let sse = json!({"url": "https://example.com/events"});
    vec![
        row(
            "spec.source.stream must have exactly one of sse, webSocket and ndjson",
            vec![
                stream(&json!({"sse": sse})),
                socket("wss://example.com/ticker"),
                lines("https://example.com/changes"),
            ],
            vec![
                stream(&json!({"idleTimeoutSeconds": 5})),
                stream(&json!({"sse": sse, "webSocket": {"url": "wss://example.com/ticker"}})),
                stream(&json!({"sse": sse, "ndjson": sse})),
            ],
        ),
        row(
            "spec.source.stream.ndjson.url must start with http",
            vec![lines("http://changes:8080/"), lines("https://example.com/?watch=true")],
            vec![lines("example.com"), lines("wss://example.com/")],
        ),
        row(
            "spec.source.stream.webSocket.url must start with ws",
            vec![socket("ws://ticker:8080/"), socket("wss://example.com/?a=b")],
            vec![
                socket("https://example.com/"),
                socket("example.com"),
                socket("WSS://example.com"),
            ],
        ),
    ]
}

/// The rules of polls of tools.
fn polled_tools() -> Vec<Row> {
    let tool = |url: &str| {
        source(&json!({"poll": {"tool": {"server": {"url": url}, "name": "prices", "arguments": {"a": [1]}}}}))
    };
    vec![row(
        "spec.source.poll.tool.server.url must start with http",
        vec![tool("http://prices:8080/mcp"), tool("https://example.com/mcp")],
        vec![tool("example.com"), tool("stdio://prices")],
    )]
}

/// The rules of TLS.
fn tls() -> Vec<Row> {
    type Wrapping = fn(Value) -> Value;
    let places: [(&str, &str, Wrapping); 6] = [
        (
            "spec.source.poll.http.tls requires a url that starts with https://",
            "http",
            |place| json!({"poll": {"http": place}}),
        ),
        (
            "spec.source.poll.prometheus.tls requires a url that starts with https://",
            "http",
            |place| json!({"poll": {"prometheus": with(place, &json!({"query": "up"}))}}),
        ),
        (
            "spec.source.poll.tool.server.tls requires a url that starts with https://",
            "http",
            |place| json!({"poll": {"tool": {"server": place, "name": "t"}}}),
        ),
        (
            "spec.source.stream.sse.tls requires a url that starts with https://",
            "http",
            |place| json!({"stream": {"sse": place}}),
        ),
        (
            "spec.source.stream.ndjson.tls requires a url that starts with https://",
            "http",
            |place| json!({"stream": {"ndjson": place}}),
        ),
        (
            "spec.source.stream.webSocket.tls requires a url that starts with wss://",
            "ws",
            |place| json!({"stream": {"webSocket": place}}),
        ),
    ];
    let ca = json!({"caSecretRef": {"name": "roots"}});
    let rules = places.map(|(says, scheme, wrap)| {
        let place = |secure: &str, tls: &Value| {
            let place = json!({"url": format!("{scheme}{secure}://example.com/")});
            let with_tls = if tls.is_null() {
                place.clone()
            } else {
                with(place.clone(), &json!({"tls": tls}))
            };
            source(&wrap(with_tls))
        };
        row(
            says,
            vec![place("s", &ca), place("s", &Value::Null), place("", &Value::Null)],
            vec![place("", &ca)],
        )
    });
    let each = |tls: &Value| {
        let place = |scheme: &str| json!({"url": format!("{scheme}s://example.com/"), "tls": tls});
        Vec::from(places.map(|(_, scheme, wrap)| source(&wrap(place(scheme)))))
    };
    let certificate = json!({"clientCertificateSecretRef": {"name": "me"}});
    let mut rows = Vec::from(rules);
    rows.push(row(
        "tls of a source must have caSecretRef, clientCertificateSecretRef or both",
        [each(&ca), each(&certificate)].concat(),
        each(&json!({})),
    ));
    rows
}

/// The rule of schedules.
fn crons() -> Row {
    let cron = |cron: &str| spec(&json!({"source": {"schedule": {"cron": cron}}}));
    row(
        "spec.source.schedule.cron must be five fields",
        vec![
            cron("0 8 * * 1-5"),
            cron("*/5 0-6,22 L JAN-MAR,12 *"),
            cron(" 0  8  ?  *  MON#1 "),
            cron("0 8 15W feb sun,2"),
        ],
        vec![
            cron("every day"),
            cron("every day at 8 o'clock"),
            cron("@annually"),
            cron("0 8 * * * *"),
            cron("0 8 * *    "),
            cron("8am * * * *"),
        ],
    )
}

/// The rules of all Sensors.
fn general() -> Vec<Row> {
    let named = |name: &str| with(sensor(), &json!({"metadata": {"name": name}}));
    let receivers = |names: &Value, selector: &Value| spec(&json!({"agentNames": names, "agentSelector": selector}));
    let zone = |zone: &str| spec(&json!({"source": {"schedule": {"timeZone": zone}}}));
    let watch = |path: &str| source(&json!({"watch": {"path": path}}));
    vec![
        row(
            "metadata.name of a Sensor must be at most 63 characters",
            vec![named(&"a".repeat(63))],
            vec![named(&"a".repeat(64))],
        ),
        row(
            "spec has no receivers: set spec.agentNames, or spec.agentSelector",
            vec![
                receivers(&json!(["a", "b"]), &Value::Null),
                receivers(&Value::Null, &json!({})),
                receivers(&json!([]), &json!({"matchLabels": {"team": "a"}})),
            ],
            vec![
                receivers(&Value::Null, &Value::Null),
                receivers(&json!([]), &Value::Null),
            ],
        ),
        row(
            "spec.source must have exactly one of schedule",
            vec![
                sensor(),
                watch("inbox/"),
                webhook(&json!({})),
                source(&json!({"stream": {"sse": {"url": "https://example.com/"}}})),
            ],
            vec![
                spec(&json!({"source": {"schedule": null}})),
                spec(&json!({"source": {"watch": {"path": "inbox/"}}})),
                with(
                    webhook(&json!({})),
                    &json!({"spec": {"source": {"schedule": {"cron": "0 8 * * 1-5"}}}}),
                ),
                with(
                    webhook(&json!({})),
                    &json!({"spec": {"source": {"poll": {"http": {"url": "https://example.com/"}}}}}),
                ),
            ],
        ),
        row(
            "spec.source.watch.path must be relative to the workspace",
            vec![watch("inbox/"), watch("."), watch("a/..b/c"), watch("a b/.c")],
            vec![
                watch("/etc"),
                watch(".."),
                watch("../a"),
                watch("a/../b"),
                watch("a/.."),
            ],
        ),
        row(
            "spec.source.schedule.timeZone must be a name of the IANA time zone database",
            vec![
                zone("UTC"),
                zone("Europe/Berlin"),
                zone("America/Argentina/Buenos_Aires"),
                zone("Etc/GMT+12"),
            ],
            vec![
                zone("+01:00"),
                zone("Europe/"),
                zone("../etc/localtime"),
                zone("Europe Berlin"),
            ],
        ),
        row(
            "spec.task and spec.notification are mutually exclusive: remove one of them",
            vec![
                spec(&json!({"task": {"prompt": "'look'"}})),
                spec(&json!({"notification": {"text": "'look'"}})),
            ],
            vec![spec(
                &json!({"task": {"prompt": "'look'"}, "notification": {"text": "'look'"}}),
            )],
        ),
        row(
            "spec.signals[] must have when (an expression), model",
            vec![
                signal(&json!({"when": "true"})),
                signal(&json!({"model": {"prompt": "?"}})),
                signal(&json!({"when": "true", "model": {"prompt": "?", "thresholdPercent": 100}})),
            ],
            vec![signal(&json!({})), signal(&json!({"notify": false}))],
        ),
        selecting("spec.agentSelector.matchExpressions[].values", |selector| {
            spec(&json!({"agentSelector": selector}))
        }),
    ]
}
