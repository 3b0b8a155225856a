//! Tests of both text formats.

use pretty_assertions::assert_eq;

use super::*;

/// What a family looks like.
fn text(format: ExpositionFormat, head: FamilyHead<'_>, write: impl FnOnce(&mut FamilyWriter<'_, '_>)) -> String {
    let mut text = Vec::new();
    let mut sink = |piece: Vec<u8>| {
        text.extend(piece);
        true
    };
    let mut writer = MetricWriter::new(format, &mut sink);
    write(&mut writer.family(head));
    writer.finish();
    String::from_utf8(text).unwrap()
}

const COUNTER: FamilyHead<'_> = FamilyHead {
    name: "cost_usd_total",
    help: "A \"cost\",\nin \\.",
    kind: MetricKind::Counter,
    is_of_process: true,
};

fn exemplar(length: usize) -> Exemplar {
    Exemplar {
        trace_id: "a".repeat(length),
        value: 0.5,
        seconds: 1_767_326_400.25,
    }
}

#[test]
fn a_counter_has_its_suffix_in_both_formats_and_a_unit_and_exemplars_in_openmetrics_only() {
    let write = |family: &mut FamilyWriter<'_, '_>| {
        family.value(&[("a", "x")], 2.5, Some(&exemplar(32)));
        family.value(&[], 7.0, None);
    };
    assert_eq!(
        text(ExpositionFormat::Text, COUNTER, write),
        "# HELP cost_usd_total A \"cost\",\\nin \\\\.\n\
         # TYPE cost_usd_total counter\n\
         cost_usd_total{a=\"x\"} 2.5\n\
         cost_usd_total 7\n"
    );
    let id = "a".repeat(32);
    assert_eq!(
        text(ExpositionFormat::OpenMetrics, COUNTER, write),
        format!(
            "# HELP cost_usd A \\\"cost\\\",\\nin \\\\.\n\
             # TYPE cost_usd counter\n\
             # UNIT cost_usd usd\n\
             cost_usd_total{{a=\"x\"}} 2.5 # {{trace_id=\"{id}\"}} 0.5 1767326400.25\n\
             cost_usd_total 7\n\
             # EOF\n"
        )
    );
}

#[test]
fn an_exemplar_has_up_to_128_characters() {
    for (length, shown) in [(120, true), (121, false)] {
        let text = text(ExpositionFormat::OpenMetrics, COUNTER, |family| {
            family.value(&[], 1.0, Some(&exemplar(length)));
        });
        assert_eq!(text.contains(" # {"), shown, "{length}");
    }
}

#[test]
fn a_histogram_has_an_unbounded_bucket_and_exemplars_in_its_buckets() {
    let head = FamilyHead {
        name: "wait_seconds",
        help: "Waits.",
        kind: MetricKind::Histogram,
        is_of_process: true,
    };
    let one = exemplar(1);
    let write = |family: &mut FamilyWriter<'_, '_>| {
        family.histogram(&[("a", "x")], [(0.5, 1, None), (1.0, 2, Some(&one))], 3.5, 3);
    };
    assert_eq!(
        text(ExpositionFormat::Text, head, write),
        "# HELP wait_seconds Waits.\n# TYPE wait_seconds histogram\n\
         wait_seconds_bucket{a=\"x\",le=\"0.5\"} 1\n\
         wait_seconds_bucket{a=\"x\",le=\"1\"} 2\n\
         wait_seconds_bucket{a=\"x\",le=\"+Inf\"} 3\n\
         wait_seconds_sum{a=\"x\"} 3.5\n\
         wait_seconds_count{a=\"x\"} 3\n"
    );
    assert_eq!(
        text(ExpositionFormat::OpenMetrics, head, write),
        "# HELP wait_seconds Waits.\n# TYPE wait_seconds histogram\n# UNIT wait_seconds seconds\n\
         wait_seconds_bucket{a=\"x\",le=\"0.5\"} 1\n\
         wait_seconds_bucket{a=\"x\",le=\"1.0\"} 2 # {trace_id=\"a\"} 0.5 1767326400.25\n\
         wait_seconds_bucket{a=\"x\",le=\"+Inf\"} 3\n\
         wait_seconds_sum{a=\"x\"} 3.5\n\
         wait_seconds_count{a=\"x\"} 3\n\
         # EOF\n"
    );
}

#[test]
fn facts_are_gauges_in_text_and_have_their_own_type_in_openmetrics() {
    let head = FamilyHead {
        name: "build_info",
        help: "Facts.",
        kind: MetricKind::Gauge,
        is_of_process: true,
    };
    let write = |family: &mut FamilyWriter<'_, '_>| family.value(&[("v", "1")], 1.0, None);
    let plain = text(ExpositionFormat::Text, head, write);
    assert!(
        plain.contains("# TYPE build_info gauge\nbuild_info{v=\"1\"} 1\n"),
        "{plain}"
    );
    let open = text(ExpositionFormat::OpenMetrics, head, write);
    assert!(open.contains("# TYPE build info\nbuild_info{v=\"1\"} 1\n"), "{open}");
}

#[test]
fn a_family_without_samples_is_absent_and_values_of_labels_are_escaped() {
    let head = FamilyHead {
        kind: MetricKind::Gauge,
        is_of_process: true,
        ..COUNTER
    };
    assert_eq!(text(ExpositionFormat::Text, head, |_| {}), "");
    let escaped = text(ExpositionFormat::Text, head, |family| {
        family.value(&[("a", "\"\\\n§")], f64::INFINITY, None);
        family.value(&[("a", "")], f64::NAN, None);
    });
    assert!(
        escaped.ends_with("cost_usd_total{a=\"\\\"\\\\\\n§\"} +Inf\ncost_usd_total{a=\"\"} NaN\n"),
        "{escaped}"
    );
}

#[test]
fn the_text_is_written_in_bounded_pieces_and_ends_when_the_reader_is_gone() {
    let mut sizes = Vec::new();
    let mut sink = |piece: Vec<u8>| {
        sizes.push(piece.len());
        sizes.len() < 3
    };
    let mut writer = MetricWriter::new(ExpositionFormat::Text, &mut sink);
    let mut family = writer.family(COUNTER);
    for _ in 0..100_000 {
        family.value(&[("a", "0123456789")], 1.0, None);
    }
    assert!(!family.is_open());
    writer.finish();
    assert_eq!(sizes.len(), 3);
    assert!(
        sizes.iter().all(|size| (PIECE..PIECE + 100).contains(size)),
        "{sizes:?}"
    );
}

#[test]
fn openmetrics_is_served_to_clients_that_prefer_it() {
    use ExpositionFormat::{OpenMetrics, Text};
    let prometheus_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                        text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                        application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;\
                        q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
    for (accept, format) in [
        (prometheus_2, OpenMetrics),
        (prometheus_3, OpenMetrics),
        ("application/openmetrics-text", OpenMetrics),
        ("Application/OpenMetrics-Text; Version=1.0.0", OpenMetrics),
        ("application/openmetrics-text; version=\"1.0.0\"", OpenMetrics),
        ("application/openmetrics-text; version=2.0.0", Text),
        ("application/openmetrics-text;q=0", Text),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.3", Text),
        ("text/html, */*;q=0.8", Text),
        ("", Text),
    ] {
        assert_eq!(ExpositionFormat::negotiate(accept), format, "{accept}");
    }
}

#[test]
fn whole_numbers_are_written_as_floats_are() {
    let exact = 2_f64.powi(53);
    for value in [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        12_345.0,
        12_345.678,
        exact - 1.0,
        exact,
        exact + 2.0,
        1e300,
        f64::MAX,
        f64::MIN_POSITIVE,
        f64::NAN,
    ] {
        let text = text(ExpositionFormat::Text, COUNTER, |family| family.value(&[], value, None));
        let written = text.lines().last().and_then(|line| line.split_once(' '));
        assert_eq!(written, Some(("cost_usd_total", value.to_string().as_str())));
    }
}

#[test]
fn labels_that_are_written_once_for_all_families_are_the_same_text() {
    let objects = [["team-a", "x"], ["", "\"\\\n§"], ["team-b", ""]];
    let mut starts = LabelStarts::default();
    for [namespace, name] in objects {
        starts.push([("namespace", namespace), ("name", name)]);
    }
    let written = |once: bool| {
        let mut text = Vec::new();
        let mut sink = |piece: Vec<u8>| {
            text.extend(piece);
            true
        };
        let mut writer = MetricWriter::new(ExpositionFormat::OpenMetrics, &mut sink);
        for head in [
            COUNTER,
            FamilyHead {
                name: "wait_seconds",
                kind: MetricKind::Histogram,
                ..COUNTER
            },
        ] {
            let mut family = writer.family(head);
            for ([namespace, name], start) in objects.into_iter().zip(starts.iter()) {
                assert_eq!(start.values, [namespace, name]);
                if once {
                    family.start_with(start);
                }
                let labels = [("namespace", namespace), ("name", name), ("model", "m\n")];
                family.value(&labels[..2], 1.5, Some(&exemplar(3)));
                family.value(&labels, 2.0, None);
                family.summary(&labels, 2.5, 3);
                family.histogram(&labels[..2], [(0.5, 1, None)], 0.5, 1);
            }
        }
        writer.finish();
        String::from_utf8(text).unwrap()
    };
    assert_eq!(starts.iter().count(), objects.len());
    assert_eq!(written(true), written(false));
}
