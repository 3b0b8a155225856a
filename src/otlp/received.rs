//! Reads the messages of a worker, which may hold anything: record by record, so that a message never takes much more memory
//! than its bytes, and without what no worker of this version sends.

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Records that one message of a worker may have; the rest is dropped.
pub(crate) const MAX_RECEIVED: usize = 1_024;
/// Text of a record: its message and its fields. What is longer is cut before it is sent.
pub(crate) const MAX_TEXT: usize = 8 * 1024;
/// Longest record of a worker, with room for what is not text and without texts of a loop; a longer one is dropped.
pub(crate) const MAX_BYTES: usize = 2 * MAX_TEXT;
/// Longest name of a scope.
const MAX_NAME: usize = 256;
/// Attributes, events or links of a record; the default of OpenTelemetry's SDKs.
pub(crate) const MAX_ENTRIES: usize = 128;

/// The records of a message.
pub(crate) struct ReceivedRecords<R> {
    /// Each with the name of its scope.
    pub(crate) records: Vec<(String, R)>,
    /// Those that were too many or too long.
    pub(crate) dropped: usize,
}

impl<R: Message + Default> ReceivedRecords<R> {
    /// Reads a request to export log records or spans: both have the same numbers of fields. Those longer than `max` bytes are
    /// dropped. `None`: this is no such request.
    pub(crate) fn read(message: &[u8], max: usize) -> Option<Self> {
        let mut read = Self {
            records: Vec::new(),
            dropped: 0,
        };
        each_field(message, |tag, resource| match tag {
            1 => each_field(resource, |tag, scope| match tag {
                2 => read.scope(scope, max),
                _ => Some(()),
            }),
            _ => Some(()),
        })?;
        Some(read)
    }

    fn scope(&mut self, scope: &[u8], max: usize) -> Option<()> {
        let mut name = String::new();
        each_field(scope, |tag, field| match tag {
            1 => each_field(field, |tag, text| {
                if tag == 1 {
                    name = cut(
                        String::from_utf8_lossy(text.get(..MAX_NAME).unwrap_or(text)).into_owned(),
                        MAX_NAME,
                    );
                }
                Some(())
            }),
            _ => Some(()),
        })?;
        each_field(scope, |tag, record| {
            if tag != 2 {
                return Some(());
            }
            if self.records.len() >= MAX_RECEIVED || record.len() > max {
                self.dropped += 1;
                return Some(());
            }
            self.records.push((name.clone(), R::decode(record).ok()?));
            Some(())
        })
    }
}

/// Calls `each` with the number and the bytes of each field of a message that has bytes. `None`: this is no message, or `each`
/// says so.
fn each_field<'a>(mut message: &'a [u8], mut each: impl FnMut(u32, &'a [u8]) -> Option<()>) -> Option<()> {
    while !message.is_empty() {
        let (tag, wire_type) = decode_key(&mut message).ok()?;
        if wire_type != WireType::LengthDelimited {
            skip_field(wire_type, tag, &mut message, DecodeContext::default()).ok()?;
            continue;
        }
        let length = usize::try_from(decode_varint(&mut message).ok()?).ok()?;
        let (field, rest) = message.split_at_checked(length)?;
        message = rest;
        each(tag, field)?;
    }
    Some(())
}

/// Removes attributes that are too many, or neither a scalar nor a list of scalars.
pub(crate) fn limit_attributes(attributes: &mut Vec<KeyValue>) {
    let is_scalar = |value: &AnyValue| !matches!(value.value, Some(Value::ArrayValue(_) | Value::KvlistValue(_)));
    attributes.retain(|attribute| match &attribute.value {
        Some(AnyValue {
            value: Some(Value::ArrayValue(list)),
        }) => list.values.iter().all(is_scalar),
        Some(value) => is_scalar(value),
        None => true,
    });
    limit(attributes);
}

/// Removes what is too many, with its memory.
pub(crate) fn limit<T>(entries: &mut Vec<T>) {
    entries.truncate(MAX_ENTRIES);
    entries.shrink_to_fit();
}

/// The beginning of a text, of at most `max` bytes.
pub(crate) fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
    }
    text
}
