//! Writes metrics as text, in the Prometheus text format 0.0.4 and in `OpenMetrics` 1.0, or as samples to something else.
//!
//! Owns both formats of text. The text leaves in pieces, so that a scrape needs the memory of one piece however many series
//! there are. ADR 0096 explains why this is not the encoder of a library.

use std::io::Write as _;

use super::registry::{Metric, MetricKind, MetricSource};

/// Size at which a piece is handed on.
const PIECE: usize = 32 * 1024;
/// Room in a piece for the sample that reaches this size, so that few pieces grow.
const LAST_SAMPLE: usize = 1024;
/// Whole numbers below this are exact as floats.
const EXACT: u64 = 1 << f64::MANTISSA_DIGITS;
/// The units that `OpenMetrics` lists: the last word of the family's name.
const UNITS: [&str; 3] = ["seconds", "bytes", "usd"];
/// The most characters of names and values of an exemplar's labels, as `OpenMetrics` requires.
const MAX_EXEMPLAR: usize = 128;

/// A text format for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// The Prometheus text format 0.0.4.
    Text,
    /// `OpenMetrics` 1.0.
    OpenMetrics,
}

impl ExpositionFormat {
    /// The format that a header `Accept` prefers: `OpenMetrics` if it is named with at least the weight of plain text.
    #[must_use]
    pub fn negotiate(accept: &str) -> Self {
        let (mut open, mut text) = (0_u16, 0_u16);
        for range in accept.split(',') {
            let range = range.to_ascii_lowercase();
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default();
            let (mut weight, mut version) = (1000, None);
            for part in parts {
                match part.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
                    Some(("q", value)) => weight = thousandths(value),
                    Some(("version", value)) => version = Some(value.trim_matches('"')),
                    _ => {}
                }
            }
            match (media, version) {
                ("application/openmetrics-text", None | Some("0.0.1" | "1.0.0")) => open = open.max(weight),
                ("text/plain", None | Some("0.0.4")) | ("text/*" | "*/*", _) => text = text.max(weight),
                _ => {}
            }
        }
        if open > 0 && open >= text {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// The media type of the response.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A weight of `Accept` or `Accept-Encoding`, such as `0.5`, in thousandths; 0 if it is none.
pub(super) fn thousandths(weight: &str) -> u16 {
    let number = weight.parse::<f32>().unwrap_or_default().clamp(0.0, 1.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number from 0 to 1000"
    )]
    let thousandths = (number * 1000.0) as u16;
    thousandths
}

/// A trace that contributed to a counter or to a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Exemplar {
    /// Id of the trace.
    pub trace_id: String,
    /// What was observed or added.
    pub value: f64,
    /// Time of the observation, in seconds since the Unix epoch.
    pub seconds: f64,
}

/// The metadata of a family, written before its samples.
#[derive(Clone, Copy, Debug)]
pub struct FamilyHead<'a> {
    pub name: &'a str,
    pub help: &'a str,
    pub kind: MetricKind,
    /// Whether its counts began with the process.
    pub is_of_process: bool,
}

impl<'a> FamilyHead<'a> {
    /// The name without the suffix of a counter.
    pub(super) fn base(&self) -> &'a str {
        match self.kind {
            MetricKind::Counter => self.name.strip_suffix("_total").unwrap_or(self.name),
            MetricKind::Gauge | MetricKind::Histogram | MetricKind::Summary => self.name,
        }
    }

    /// The unit: the last word of the base name, if it is one.
    pub(super) fn unit(&self) -> Option<&'a str> {
        let (_, last) = self.base().rsplit_once('_')?;
        UNITS.contains(&last).then_some(last)
    }
}

impl<'a> From<&'a Metric> for FamilyHead<'a> {
    fn from(metric: &'a Metric) -> Self {
        Self {
            name: metric.name,
            help: metric.help,
            kind: metric.kind,
            is_of_process: matches!(metric.source, MetricSource::Controller | MetricSource::Process),
        }
    }
}

/// Takes samples instead of text.
pub(super) trait SampleTarget {
    /// Whether it still takes samples.
    fn is_open(&self) -> bool;
    /// The value of a counter or gauge.
    fn value(&mut self, head: FamilyHead<'_>, labels: &Labels<'_>, value: f64, exemplar: Option<&Exemplar>);
    /// A summary.
    fn summary(&mut self, head: FamilyHead<'_>, labels: &Labels<'_>, sum: f64, count: u64);
    /// A histogram, with cumulative buckets.
    fn histogram(
        &mut self,
        head: FamilyHead<'_>,
        labels: &Labels<'_>,
        buckets: &[(f64, u64, Option<Exemplar>)],
        sum_and_count: (f64, u64),
    );
}

/// Takes the pieces of a text; `false`: the reader is gone.
pub type PieceSink<'a> = &'a mut dyn FnMut(Vec<u8>) -> bool;

/// Writes families of metrics, one after the other.
pub struct MetricWriter<'a> {
    format: ExpositionFormat,
    piece: Vec<u8>,
    sink: WriterSink<'a>,
    open: bool,
}

enum WriterSink<'a> {
    Text(PieceSink<'a>),
    Samples(&'a mut dyn SampleTarget),
}

impl<'a> MetricWriter<'a> {
    /// Hands the pieces to `sink`.
    pub fn new(format: ExpositionFormat, sink: PieceSink<'a>) -> Self {
        Self {
            format,
            piece: Vec::new(),
            sink: WriterSink::Text(sink),
            open: true,
        }
    }

    /// Gives the samples to `target`.
    pub(super) fn of_samples(target: &'a mut dyn SampleTarget) -> Self {
        Self {
            // There is no text.
            format: ExpositionFormat::Text,
            piece: Vec::new(),
            open: target.is_open(),
            sink: WriterSink::Samples(target),
        }
    }

    /// Gives samples to their target, if there is one. `false`: they become text.
    fn put(&mut self, give: impl FnOnce(&mut dyn SampleTarget)) -> bool {
        match &mut self.sink {
            WriterSink::Text(_) => false,
            WriterSink::Samples(target) => {
                if self.open {
                    give(*target);
                    self.open = target.is_open();
                }
                true
            }
        }
    }

    /// Begins a family. It appears with its first sample.
    pub fn family<'w>(&'w mut self, head: FamilyHead<'w>) -> FamilyWriter<'w, 'a> {
        FamilyWriter {
            writer: self,
            head,
            begun: false,
            start: LabelStart::default(),
        }
    }

    /// Whether the text still has a reader.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Ends the text.
    pub fn finish(mut self) {
        if self.format == ExpositionFormat::OpenMetrics {
            self.push("# EOF\n");
        }
        self.hand_on();
    }

    fn push(&mut self, text: &str) {
        self.piece.extend_from_slice(text.as_bytes());
    }

    fn push_number(&mut self, value: f64) {
        // Nearly all values are whole numbers. As an integer, one is written in a third of the time.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "another number is written as a float"
        )]
        let integer = value as u64;
        // A vector takes every write.
        if integer < EXACT && whole(integer).to_bits() == value.to_bits() {
            let _ = write!(self.piece, "{integer}");
        } else if value.is_infinite() {
            self.push(if value > 0.0 { "+Inf" } else { "-Inf" });
        } else {
            let _ = write!(self.piece, "{value}");
        }
    }

    /// The bound of a bucket. `OpenMetrics` shows that it is a float.
    fn push_bound(&mut self, bound: f64) {
        if self.format == ExpositionFormat::OpenMetrics && bound.is_finite() {
            let _ = write!(self.piece, "{bound:?}");
        } else {
            self.push_number(bound);
        }
    }

    fn hand_on(&mut self) {
        let piece = std::mem::take(&mut self.piece);
        if let WriterSink::Text(sink) = &mut self.sink
            && self.open
            && !piece.is_empty()
        {
            self.open = sink(piece);
        }
    }
}

/// Labels of a sample: names and values.
pub type Labels<'a> = [(&'a str, &'a str)];

fn write_escaped(text: &mut Vec<u8>, value: &str, quotes: bool) {
    let is_special = |one: u8| matches!(one, b'\\' | b'\n') || (quotes && one == b'"');
    let mut rest = value.as_bytes();
    // Nearly no value has one. Without a way out of the loop, it compares many bytes at once.
    if rest.iter().fold(false, |found, one| found | is_special(*one)) {
        while let Some(at) = rest.iter().position(|one| is_special(*one)) {
            let (before, special) = rest.split_at(at);
            text.extend_from_slice(before);
            text.extend_from_slice(match special.first() {
                Some(b'\n') => b"\\n",
                Some(b'"') => b"\\\"",
                _ => b"\\\\",
            });
            rest = special.get(1..).unwrap_or_default();
        }
    }
    text.extend_from_slice(rest);
}

fn write_label(text: &mut Vec<u8>, name: &str, value: &str, first: &mut bool) {
    text.push(if std::mem::take(first) { b'{' } else { b',' });
    text.extend_from_slice(name.as_bytes());
    text.extend_from_slice(b"=\"");
    write_escaped(text, value, true);
    text.push(b'"');
}

/// The two labels that all samples of an object begin with.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LabelStart<'a> {
    /// As they are written.
    text: &'a [u8],
    /// How many labels the text has; 0 without an object.
    count: usize,
    /// Their values.
    pub(super) values: [&'a str; 2],
}

/// The first labels of each object of a snapshot, in its order.
///
/// They are written once, for all families, and stand beside each other: names of objects are all over the memory, so
/// that a scrape would wait for most of them, in each family again.
#[derive(Debug, Default)]
pub(super) struct LabelStarts {
    text: Vec<u8>,
    values: String,
    /// Where the text and the values of each object end.
    ends: Vec<(usize, [usize; 2])>,
}

impl LabelStarts {
    /// Adds the labels of the next object.
    pub(super) fn push(&mut self, labels: [(&str, &str); 2]) {
        let mut first = true;
        let ends = labels.map(|(name, value)| {
            write_label(&mut self.text, name, value, &mut first);
            self.values.push_str(value);
            self.values.len()
        });
        self.ends.push((self.text.len(), ends));
    }

    /// The labels of each object.
    pub(super) fn iter(&self) -> impl Iterator<Item = LabelStart<'_>> {
        let (mut text, mut value) = (0, 0);
        self.ends.iter().map(move |(text_end, value_ends)| LabelStart {
            text: self
                .text
                .get(std::mem::replace(&mut text, *text_end)..*text_end)
                .unwrap_or_default(),
            count: value_ends.len(),
            values: value_ends.map(|end| {
                self.values
                    .get(std::mem::replace(&mut value, end)..end)
                    .unwrap_or_default()
            }),
        })
    }
}

/// Writes the samples of one family.
pub struct FamilyWriter<'w, 'a> {
    writer: &'w mut MetricWriter<'a>,
    head: FamilyHead<'w>,
    begun: bool,
    start: LabelStart<'w>,
}

impl<'w> FamilyWriter<'w, '_> {
    /// Has the first labels of the samples that follow written as this text.
    pub(super) fn start_with(&mut self, start: LabelStart<'w>) {
        self.start = start;
    }

    /// Whether the text still has a reader.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.writer.open
    }

    /// Writes the value of a counter or gauge. An exemplar is for counters only.
    pub fn value(&mut self, labels: &Labels<'_>, value: f64, exemplar: Option<&Exemplar>) {
        let head = self.head;
        if self.writer.put(|target| target.value(head, labels, value, exemplar)) {
            return;
        }
        self.sample("", labels, None, value, exemplar);
    }

    /// Writes a summary, which has no quantiles.
    pub fn summary(&mut self, labels: &Labels<'_>, sum: f64, count: u64) {
        let head = self.head;
        if self.writer.put(|target| target.summary(head, labels, sum, count)) {
            return;
        }
        self.sample("_sum", labels, None, sum, None);
        self.sample("_count", labels, None, whole(count), None);
    }

    /// Writes a histogram: its cumulative buckets in ascending order, each with an exemplar if there is one. The last,
    /// unbounded one is added if it is missing.
    pub fn histogram<'e>(
        &mut self,
        labels: &Labels<'_>,
        buckets: impl IntoIterator<Item = (f64, u64, Option<&'e Exemplar>)>,
        sum: f64,
        count: u64,
    ) {
        let head = self.head;
        if matches!(self.writer.sink, WriterSink::Samples(_)) {
            let buckets = buckets.into_iter();
            let buckets = buckets.map(|(bound, cumulative, exemplar)| (bound, cumulative, exemplar.cloned()));
            let buckets: Vec<_> = buckets.collect();
            self.writer
                .put(|target| target.histogram(head, labels, &buckets, (sum, count)));
            return;
        }
        let mut bounded = true;
        for (bound, cumulative, exemplar) in buckets {
            bounded = bound.is_finite();
            self.sample("_bucket", labels, Some(bound), whole(cumulative), exemplar);
        }
        if bounded {
            self.sample("_bucket", labels, Some(f64::INFINITY), whole(count), None);
        }
        self.sample("_sum", labels, None, sum, None);
        self.sample("_count", labels, None, whole(count), None);
    }

    fn sample(
        &mut self,
        suffix: &str,
        labels: &Labels<'_>,
        bound: Option<f64>,
        value: f64,
        exemplar: Option<&Exemplar>,
    ) {
        if !self.writer.open {
            return;
        }
        if !std::mem::replace(&mut self.begun, true) {
            self.begin();
        }
        let writer = &mut *self.writer;
        if writer.piece.is_empty() {
            writer.piece.reserve(PIECE + LAST_SAMPLE);
        }
        writer.push(self.head.name);
        writer.push(suffix);
        writer.piece.extend_from_slice(self.start.text);
        let mut first = self.start.count == 0;
        for (name, value) in labels.iter().skip(self.start.count) {
            write_label(&mut writer.piece, name, value, &mut first);
        }
        if let Some(bound) = bound {
            writer.push(if std::mem::take(&mut first) { "{" } else { "," });
            writer.push("le=\"");
            writer.push_bound(bound);
            writer.push("\"");
        }
        writer.push(if first { " " } else { "} " });
        writer.push_number(value);
        if let Some(exemplar) = exemplar.filter(|one| one.trace_id.chars().count() + "trace_id".len() <= MAX_EXEMPLAR)
            && writer.format == ExpositionFormat::OpenMetrics
        {
            writer.push(" # ");
            write_label(&mut writer.piece, "trace_id", &exemplar.trace_id, &mut true);
            writer.push("} ");
            writer.push_number(exemplar.value);
            writer.push(" ");
            writer.push_number(exemplar.seconds);
        }
        writer.push("\n");
        if writer.piece.len() >= PIECE {
            writer.hand_on();
        }
    }

    /// Writes the lines about the family.
    fn begin(&mut self) {
        let FamilyHead { name, help, kind, .. } = self.head;
        let unit = self.head.unit();
        let writer = &mut *self.writer;
        let open_metrics = writer.format == ExpositionFormat::OpenMetrics;
        let plain: &str = kind.into();
        // In OpenMetrics a family has no suffix, and facts have a type of their own.
        let (family, kind) = match kind {
            MetricKind::Counter if open_metrics => (self.head.base(), plain),
            MetricKind::Gauge if open_metrics => {
                name.strip_suffix("_info").map_or((name, plain), |name| (name, "info"))
            }
            MetricKind::Counter | MetricKind::Gauge | MetricKind::Histogram | MetricKind::Summary => (name, plain),
        };
        writer.push("# HELP ");
        writer.push(family);
        writer.push(" ");
        write_escaped(&mut writer.piece, help, open_metrics);
        for part in ["\n# TYPE ", family, " ", kind, "\n"] {
            writer.push(part);
        }
        if let Some(unit) = unit.filter(|_| open_metrics) {
            for part in ["# UNIT ", family, " ", unit, "\n"] {
                writer.push(part);
            }
        }
    }
}

/// Prometheus has only floating-point numbers; they are exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn whole(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
