//! The Sensors of a run as text and as JSON lines, and the addresses of their webhooks.
//!
//! Contains no text of a payload.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};

use super::roles::WebhookAddresses;
use crate::api::{NamespacedName, Sensor};
use crate::api_server::ObjectKey;
use crate::api_server::object_key::SENSORS;
use crate::page::sensor_rows::SensorRow;

/// Rows that are drawn; more are counted.
const MAX_ROWS: usize = 20;

/// The row of a Sensor. `webhook`: where it listens.
#[must_use]
pub fn row(sensor: &Sensor, webhook: Option<&SocketAddr>) -> SensorRow {
    SensorRow {
        url: webhook.map(|address| format!("http://{address}/")),
        ..SensorRow::of(sensor)
    }
}

/// A row as a JSON line.
#[must_use]
pub fn json_row(row: &SensorRow, now: &str) -> Value {
    let mut line = json!({
        "ts": now, "type": "sensor", "namespace": row.namespace, "sensor": row.sensor, "source": row.source,
        "ready": row.ready, "events": row.counts.0, "errors": row.counts.1,
    });
    if let Some(url) = &row.url {
        line["url"] = json!(url);
    }
    if let Some(message) = &row.message {
        line["message"] = json!(message);
    }
    line
}

/// The rows as a table; empty without rows.
#[must_use]
pub fn table(rows: &[SensorRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let several = rows.windows(2).any(|pair| pair[0].namespace != pair[1].namespace);
    let name = |row: &SensorRow| {
        if several {
            format!("{}/{}", row.namespace, row.sensor)
        } else {
            row.sensor.clone()
        }
    };
    let width = rows.iter().map(|row| name(row).chars().count()).fold(6, usize::max);
    let mut text = format!(
        "\n{:width$}  {:9} {:7} {:>6} {:>6}\n",
        "SENSOR", "TYPE", "READY", "EVENTS", "ERRORS"
    );
    for row in rows.iter().take(MAX_ROWS) {
        let more = row.message.as_deref().or(row.url.as_deref()).unwrap_or_default();
        let (source, (events, errors)) = (&row.source, row.counts);
        let cells = format!(
            "{:width$}  {source:9} {:7} {events:>6} {errors:>6}  {more}",
            name(row),
            row.ready
        );
        text.push_str(cells.trim_end());
        text.push('\n');
    }
    if rows.len() > MAX_ROWS {
        let _ = writeln!(text, "and {} more", rows.len() - MAX_ROWS);
    }
    text
}

/// Assigns each webhook a port of this machine, from `first` on, in the order of their names. Fails if one is taken.
pub fn webhooks<'a>(
    objects: impl Iterator<Item = (&'a ObjectKey, &'a Value)>,
    first: u16,
) -> Result<WebhookAddresses, String> {
    let mut keys: Vec<_> = objects
        .filter(|(key, object)| key.resource == SENSORS && !object["spec"]["source"]["webhook"].is_null())
        .map(|(key, _)| NamespacedName::new(&key.namespace, &key.name))
        .collect();
    keys.sort();
    let mut webhooks = WebhookAddresses::new();
    for (key, port) in keys.into_iter().zip(u32::from(first)..) {
        let place = format!(
            "--webhook-port: Sensor {} would listen on 127.0.0.1:{port}, which",
            key.name
        );
        let port =
            u16::try_from(port).map_err(|_| format!("{place} is not a valid port; use a lower --webhook-port"))?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        std::net::TcpListener::bind(address)
            .map_err(|error| format!("{place} cannot be used ({}); use another --webhook-port", error.kind()))?;
        webhooks.insert(key, address);
    }
    Ok(webhooks)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn webhook(name: &str) -> (ObjectKey, Value) {
        (
            ObjectKey::new(SENSORS, "n", name),
            json!({ "spec": { "source": { "webhook": { "scheme": "GitHub" } } } }),
        )
    }

    /// A port whose next port is free too, as far as can be known.
    fn two_free() -> u16 {
        loop {
            let one = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let port = one.local_addr().unwrap().port();
            if port < u16::MAX && std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
                return port;
            }
        }
    }

    #[test]
    fn webhooks_receive_ports_in_the_order_of_their_names_and_other_sensors_receive_none() {
        let clock = (
            ObjectKey::new(SENSORS, "n", "a"),
            json!({ "spec": { "source": { "schedule": {} } } }),
        );
        let objects = [webhook("c"), clock, webhook("b")];
        let first = two_free();
        let given = webhooks(objects.iter().map(|(key, object)| (key, object)), first).unwrap();
        let ports: Vec<_> = given
            .iter()
            .map(|(sensor, address)| (sensor.name.as_str(), address.port()))
            .collect();
        assert_eq!(ports, [("b", first), ("c", first + 1)]);
    }

    #[test]
    fn a_port_in_use_is_named_with_its_sensor_and_the_flag() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let objects = [webhook("orders")];
        let says = webhooks(objects.iter().map(|(key, object)| (key, object)), port).unwrap_err();
        assert!(
            says.starts_with(&format!(
                "--webhook-port: Sensor orders would listen on 127.0.0.1:{port}, which"
            )),
            "{says}"
        );
        let says = webhooks(
            [webhook("a"), webhook("b")].iter().map(|(key, object)| (key, object)),
            u16::MAX,
        );
        assert!(says.is_err());
    }

    #[test]
    fn a_row_contains_the_problem_and_the_address_to_send_to() {
        let sensor: Sensor = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": { "name": "orders", "namespace": "n" },
            "spec": { "agentNames": ["a"], "source": { "webhook": {
                "scheme": "GitHub", "secretKeyRef": { "name": "hooks", "key": "main" },
            } } },
            "status": { "type": "Webhook", "events": 3, "errors": 1, "conditions": [{
                "type": "Ready", "status": "False", "reason": "SensorFailing", "message": "the key is empty",
                "lastTransitionTime": "2026-11-22T12:00:00Z",
            }] },
        }))
        .unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
        let row = row(&sensor, Some(&address));
        let line = json_row(&row, "now");
        assert_eq!(
            (&line["url"], &line["events"], &line["errors"], &line["message"]),
            (
                &json!("http://127.0.0.1:8080/"),
                &json!(3),
                &json!(1),
                &json!("SensorFailing: the key is empty")
            )
        );
        let text = table(std::slice::from_ref(&row));
        assert!(
            text.contains("orders  Webhook   False        3      1  SensorFailing: the key is empty\n"),
            "{text}"
        );
        let fine = SensorRow {
            message: None,
            ready: "True".into(),
            ..row
        };
        assert!(table(&[fine]).contains("True         3      1  http://127.0.0.1:8080/\n"));
        assert_eq!(table(&[]), "");
    }
}
