//! Tests of the histograms of durations: what is added, under which labels, and how many there are.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::*;
use crate::link::durations::LastDuration;
use crate::telemetry::exposition::ExpositionFormat;

/// Agents of mode Task whose specs name these models.
fn totals(models: &[&str]) -> DurationTotals {
    let labels = AgentLabels {
        mode: "Task".into(),
        models: models.iter().map(|model| (*model).to_owned()).collect(),
    };
    let labels = Box::new(move |agent: &NamespacedName| (agent.name != "gone").then(|| labels.clone()));
    DurationTotals::new(labels, Box::new(|_| true))
}

fn text(totals: &DurationTotals, format: ExpositionFormat) -> String {
    let mut text = Vec::new();
    let mut sink = |piece: Vec<u8>| {
        text.extend(piece);
        true
    };
    let mut out = MetricWriter::new(format, &mut sink);
    totals.write(&mut out);
    out.finish();
    String::from_utf8(text).unwrap()
}

/// Values of the series that begin with this.
fn values(totals: &DurationTotals, prefix: &str) -> Vec<String> {
    let text = text(totals, ExpositionFormat::Text);
    let lines = text.lines().filter(|line| line.starts_with(prefix));
    lines.map(|line| line.rsplit_once(' ').unwrap().1.to_owned()).collect()
}

fn counts(buckets: &[u64], sum_microseconds: u64) -> DurationCounts {
    DurationCounts {
        buckets: buckets.into(),
        sum_microseconds,
        last: None,
    }
}

fn calls(model: &str, counts: DurationCounts) -> DurationGrowth {
    DurationGrowth {
        calls: vec![(model.into(), counts)],
        ..DurationGrowth::default()
    }
}

fn add(totals: &DurationTotals, (namespace, name): (&str, &str), growth: &DurationGrowth) {
    add_at(totals, (namespace, name), growth, Timestamp::from_second(100).unwrap());
}

fn add_at(totals: &DurationTotals, (namespace, name): (&str, &str), growth: &DurationGrowth, now: Timestamp) {
    let agent = NamespacedName::new(namespace, name);
    totals.add((&agent, "uid"), growth, now);
}

const COUNT: &str = "agentloop_namespace_call_duration_seconds_count";

#[test]
fn reports_of_the_agents_of_a_namespace_are_summed_in_cumulative_buckets() {
    let totals = totals(&["m"]);
    add(&totals, ("a", "x"), &calls("m", counts(&[1, 2], 50_000)));
    add(&totals, ("a", "y"), &calls("m", counts(&[0, 1], 15_000)));
    add(&totals, ("b", "x"), &calls("m", counts(&[4], 4_000)));
    let growth = DurationGrowth {
        turns: counts(&[0; TURN_BOUNDS.len()], 0),
        tool_runs: counts(&[0, 0, 3], 75_000),
        ..DurationGrowth::default()
    };
    add(&totals, ("b", "x"), &growth);
    let text = text(&totals, ExpositionFormat::Text);
    for line in [
        r#"agentloop_namespace_call_duration_seconds_bucket{namespace="a",model="m",le="0.01"} 1"#,
        r#"agentloop_namespace_call_duration_seconds_bucket{namespace="a",model="m",le="0.02"} 4"#,
        r#"agentloop_namespace_call_duration_seconds_bucket{namespace="a",model="m",le="81.92"} 4"#,
        r#"agentloop_namespace_call_duration_seconds_bucket{namespace="a",model="m",le="+Inf"} 4"#,
        r#"agentloop_namespace_call_duration_seconds_sum{namespace="a",model="m"} 0.065"#,
        r#"agentloop_namespace_call_duration_seconds_count{namespace="a",model="m"} 4"#,
        r#"agentloop_namespace_call_duration_seconds_count{namespace="b",model="m"} 4"#,
        r#"agentloop_namespace_tool_call_duration_seconds_bucket{namespace="b",le="0.04"} 3"#,
        r#"agentloop_namespace_tool_call_duration_seconds_sum{namespace="b"} 0.075"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert_eq!(text.contains("turn_duration"), false, "no turn has completed");
    let turn = DurationGrowth {
        turns: counts(&[1], 1),
        ..DurationGrowth::default()
    };
    add(&totals, ("b", "x"), &turn);
    let count = r#"agentloop_namespace_turn_duration_seconds_count{namespace="b",mode="Task"}"#;
    assert_eq!(values(&totals, count), ["1"]);
}

#[test]
fn waits_for_approvals_are_there_with_zeros_from_the_first_gate_on() {
    const WAITS: &str = "agentloop_namespace_approval_wait_seconds_count";
    let totals = totals(&["m"]);
    add(&totals, ("a", "x"), &calls("m", counts(&[1], 1)));
    assert_eq!(values(&totals, WAITS), [""; 0], "nothing waits");
    let opened = DurationGrowth {
        first_gate: true,
        ..DurationGrowth::default()
    };
    add(&totals, ("a", "x"), &opened);
    assert_eq!(values(&totals, WAITS), ["0"; 5]);
    add(&totals, ("a", "gone"), &opened);
    let mut closed = DurationGrowth::default();
    // A day and a half, and 20 seconds.
    closed.approvals.denied = counts(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 1], 129_620_000_000);
    add(&totals, ("a", "x"), &closed);
    add(&totals, ("a", "y"), &closed);
    // The first that another namespace has.
    add(&totals, ("b", "x"), &closed);
    let text = text(&totals, ExpositionFormat::Text);
    for line in [
        r#"count{namespace="a",decision="Approved"} 0"#,
        r#"bucket{namespace="a",decision="Denied",le="10"} 0"#,
        r#"bucket{namespace="a",decision="Denied",le="60"} 2"#,
        r#"bucket{namespace="a",decision="Denied",le="86400"} 2"#,
        r#"bucket{namespace="a",decision="Denied",le="259200"} 4"#,
        r#"bucket{namespace="a",decision="Denied",le="604800"} 4"#,
        r#"sum{namespace="a",decision="Denied"} 259240"#,
        r#"count{namespace="a",decision="Denied"} 4"#,
        r#"count{namespace="b",decision="Denied"} 2"#,
        r#"count{namespace="b",decision="Superseded"} 0"#,
    ] {
        let line = format!("agentloop_namespace_approval_wait_seconds_{line}");
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    // What no pod can have waited.
    let mut hostile = DurationGrowth::default();
    hostile.approvals.denied = counts(&[1], MAX_MEAN + 1);
    add(&totals, ("a", "x"), &hostile);
    let denied = format!("{WAITS}{{namespace=\"a\",decision=\"Denied\"}}");
    assert_eq!(values(&totals, &denied), ["4"]);
}

#[test]
fn an_agent_that_does_not_exist_and_a_report_without_durations_have_no_series() {
    let totals = totals(&["m"]);
    add(&totals, ("a", "gone"), &calls("m", counts(&[1], 1)));
    add(&totals, ("a", "x"), &calls("m", counts(&[0, 0], 0)));
    assert_eq!(text(&totals, ExpositionFormat::Text), "");
}

/// A report can neither name a model that no spec names, nor more of them than have room.
#[rstest]
#[case::room(MAX_MODELS, 0)]
#[case::no_room(MAX_MODELS + 1, 1)]
fn a_namespace_has_series_of_as_many_models_as_have_room(#[case] models: usize, #[case] others: usize) {
    let names: Vec<String> = (0..models).map(|number| format!("m{number:02}")).collect();
    let totals = totals(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for _ in 0..2 {
        for name in &names {
            add(&totals, ("a", "x"), &calls(name, counts(&[1], 1)));
        }
    }
    assert_eq!(values(&totals, COUNT), vec!["2"; MAX_MODELS + others]);
    let other = format!("{COUNT}{{namespace=\"a\",model=\"other\"}}");
    assert_eq!(values(&totals, &other).len(), others);
    add(&totals, ("a", "x"), &calls("unheard-of", counts(&[1], 1)));
    let both = 2 * u64::try_from(others).unwrap() + 1;
    assert_eq!(values(&totals, &other), [both.to_string()]);
    // The others take no room of those with a name.
    add(&totals, ("a", "x"), &calls("m00", counts(&[1], 1)));
    assert_eq!(
        values(&totals, &format!("{COUNT}{{namespace=\"a\",model=\"m00\"}}")),
        ["3"]
    );
}

#[rstest]
#[case::max(MAX_COUNTED, 0, true)]
#[case::too_many(MAX_COUNTED + 1, 0, false)]
#[case::longest(2, 2 * MAX_MEAN, true)]
#[case::too_long(2, 2 * MAX_MEAN + 1, false)]
#[case::overflow(u64::MAX, u64::MAX, false)]
fn counts_that_no_pod_can_have_reached_are_not_added(#[case] count: u64, #[case] sum: u64, #[case] is_added: bool) {
    let totals = totals(&["m"]);
    add(&totals, ("a", "x"), &calls("m", counts(&[1], 1)));
    add(
        &totals,
        ("a", "x"),
        &calls("m", counts(&[count / 2, count - count / 2], sum)),
    );
    let expected = if is_added { count + 1 } else { 1 };
    assert_eq!(values(&totals, COUNT), [expected.to_string()]);
    // Whatever is reported, counts only grow.
    let max = counts(&[MAX_COUNTED], MAX_COUNTED * MAX_MEAN);
    for _ in 0..20 {
        add(&totals, ("a", "x"), &calls("m", max.clone()));
    }
    let table = totals.lock();
    assert_eq!(table.namespaces["a"].calls["m"].sum_microseconds, u64::MAX);
}

#[rstest]
#[case::still_in_use(IDLE - SignedDuration::from_nanos(1), false)]
#[case::idle(IDLE, true)]
fn the_namespace_that_has_not_grown_for_longest_makes_room_once_it_is_idle(
    #[case] after: SignedDuration,
    #[case] has_room: bool,
) {
    let totals = totals(&["m"]);
    let add_at = |name: &str, now| add_at(&totals, (name, "x"), &calls("m", counts(&[1], 1)), now);
    let start = Timestamp::UNIX_EPOCH;
    let namespace = |number: usize| format!("n{number:04}");
    for number in 0..MAX_NAMESPACES {
        add_at(
            &namespace(number),
            start + SignedDuration::from_nanos(i64::from(number > 1)),
        );
    }
    assert_eq!(values(&totals, COUNT).len(), MAX_NAMESPACES);
    let now = start + after;
    add_at(&namespace(0), now);
    add_at("new", now);
    // Another finds only namespaces that are in use.
    add_at("newer", now);
    let table = totals.lock();
    assert_eq!(table.namespaces.len(), MAX_NAMESPACES);
    let is_there = |name: &str| table.namespaces.contains_key(name);
    assert!(is_there("n0000") && is_there("n0002") && !is_there("newer"));
    assert_eq!((is_there("new"), is_there("n0001")), (has_room, !has_room));
}

#[test]
fn the_durations_of_a_namespace_are_dropped_with_its_last_agent() {
    let totals = totals(&["m"]);
    let of = |namespace: &str| values(&totals, &format!("{COUNT}{{namespace=\"{namespace}\""));
    let add = |namespace: &str| add(&totals, (namespace, "x"), &calls("m", counts(&[1], 1)));
    for namespace in ["a", "b", "c"] {
        add(namespace);
    }
    totals.namespace_emptied("a");
    assert_eq!((of("a").len(), of("b").len()), (0, 1));
    // Another tenant uses the name.
    add("a");
    add("a");
    assert_eq!(of("a"), ["2"]);
    let listed = BTreeSet::from([NamespacedName::new("a", "x"), NamespacedName::new("b", "y")]);
    totals.agents_listed(Some("a"), &listed);
    assert_eq!((of("a").len(), of("b").len(), of("c").len()), (1, 1, 1));
    totals.agents_listed(None, &listed);
    assert_eq!((of("a").len(), of("b").len(), of("c").len()), (1, 1, 0));
    totals.agents_listed(Some("a"), &BTreeSet::new());
    assert_eq!((of("a").len(), of("b").len()), (0, 1));
}

fn ended(microseconds: u64, bucket: &[u64]) -> DurationCounts {
    DurationCounts {
        last: Some(LastDuration {
            microseconds,
            member: 2,
            turn: 12,
        }),
        ..counts(bucket, microseconds)
    }
}

#[test]
fn the_exemplar_of_a_bucket_is_the_trace_of_the_last_turn_that_it_counted() {
    let totals = totals(&["m"]);
    add(&totals, ("a", "x"), &calls("m", ended(20_000, &[0, 1])));
    // Not in the bucket that has grown.
    add(&totals, ("a", "x"), &calls("m", ended(20_001, &[0, 1])));
    let turn = TurnName {
        agent: "uid",
        member: 2,
        turn: 12,
    };
    let trace = hex(&turn.trace_id());
    let text = text(&totals, ExpositionFormat::OpenMetrics);
    let exemplar = format!("le=\"0.02\"}} 2 # {{trace_id=\"{trace}\"}} 0.02 100\n");
    assert!(text.contains(&exemplar), "{exemplar}{text}");
    assert_eq!(text.matches("trace_id").count(), 1);
}

#[test]
fn a_trace_that_is_not_sampled_is_no_exemplar() {
    let labels = AgentLabels {
        mode: "Task".into(),
        models: vec!["m".into()],
    };
    let totals = DurationTotals::new(Box::new(move |_| Some(labels.clone())), Box::new(|_| false));
    add(&totals, ("a", "x"), &calls("m", ended(20_000, &[0, 1])));
    let text = text(&totals, ExpositionFormat::OpenMetrics);
    assert!(text.contains("_count") && !text.contains("trace_id"), "{text}");
}
