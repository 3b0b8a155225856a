//! Twenty Agents on one budget while the leader, workers and gateways are killed: the server's own sum never passes the
//! limit in any window.
//!
//! `AGENTLOOP_E2E_CHAOS_SECONDS` says for how long (60).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use agentloop::ledger::bound::{RequestOverhead, RequestPart, input_bound};
use serde_json::{Value, json};

use super::agents::{Agent, openai};
use super::budgets::manifest;
use super::cluster::{LEADER, Namespace, SettingsGuard, alone, figure};
use super::model_server::{self, Line};
use super::node;
use crate::support::kubectl::Kubectl;

const COUNT: usize = 20;
/// Length of the rolling window.
const WINDOW_SECONDS: u32 = 40;
/// The same for the clock of the record.
#[allow(clippy::cast_lossless)] // `From` is not const.
const WINDOW: f64 = WINDOW_SECONDS as f64;
/// What the Agents may use in one window. They could use more with 12 calls a second of about 14,700 tokens each, and make 20
/// on a machine that is busy with other tests: a limit that is out of reach is never felt.
const LIMIT: i64 = 6_500_000;
/// How many worst-case calls fit into the limit at least, so that the part that is reserved and not billed stays small.
const RATIO: i64 = 200;
/// Of the limit, what the fullest window uses at least then.
const USABLE_PERCENT: i64 = 95;
/// Seconds between two kills of the leader: the next one has the Lease after about four.
const RHYTHM: u64 = 6;
/// The clock of the record and that of the ledger are one clock, but the record is written with a delay.
const BLUR: f64 = 0.005;

#[test]
fn no_window_passes_its_limit_while_leaders_workers_and_gateways_are_killed() {
    let (Some(cluster), Some(server)) = (alone(), model_server::counting()) else {
        return;
    };
    let seconds = std::env::var("AGENTLOOP_E2E_CHAOS_SECONDS").ok();
    let seconds: u64 = seconds.map_or(60, |text| {
        text.parse().expect("AGENTLOOP_E2E_CHAOS_SECONDS is a number")
    });
    assert!(
        seconds > WINDOW_SECONDS.into(),
        "AGENTLOOP_E2E_CHAOS_SECONDS is more than the window of {WINDOW_SECONDS} s"
    );
    let short = SettingsGuard::short_lease(&cluster.system, (3, 1));
    let namespace = Namespace::new(&cluster.system, "chaos");
    let label = |number: usize| format!("{}.{number}", namespace.kubectl.namespace());
    let window = json!({"rolling": {"seconds": WINDOW_SECONDS}});
    let spec = json!({"selector": {}, "limits": {"tokens": LIMIT}, "window": window});
    namespace.kubectl.apply(&manifest("all", &spec));
    // Long answers, as far as half of the window goes, and a short history: what a call may cost and what it does cost are
    // not far apart, and few calls fill the limit.
    let limits = json!({
        "guardrails": {"maxConsecutiveTurns": 1000}, "loop": {"minDelayMilliseconds": 1, "historyTokens": 2_000},
        "model": {"maxOutputTokens": 17_000, "contextTokens": 34_000},
    });
    let agents: Vec<_> = (0..COUNT)
        .map(|number| {
            let model = openai(&server.base_url(&label(number)));
            Agent::apply(&namespace, &format!("spender-{number}"), &model, &limits)
        })
        .collect();
    for agent in &agents {
        agent.until_pod(None, 240);
    }
    let start = model_server::now();
    let kills = kill_for(&cluster.system, &agents, Duration::from_secs(seconds));
    let end = model_server::now();
    drop(short);

    let of_agents: Vec<_> = (0..COUNT).map(|number| bills(&server.lines(&label(number)))).collect();
    let mut bills: Vec<_> = of_agents.iter().flatten().collect();
    bills.sort_by(|a, b| a.at.total_cmp(&b.at));
    let most = most_billed(&bills);
    bills.retain(|bill| bill.at >= start);
    let among_kills = most_billed(&bills);
    let worst = bills.iter().map(|bill| bill.worst).max().expect("calls were made");
    figure(
        "budget_chaos_kills_leader_worker_gateway",
        format!("{}/{}/{}", kills[0], kills[1], kills[2]),
        "kills",
    );
    figure("budget_chaos_calls", bills.len(), "calls");
    figure("budget_chaos_limit_to_worst_case", LIMIT / worst, "times");
    figure("budget_chaos_fullest_window", share(most), "% of the limit");
    figure(
        "budget_chaos_fullest_window_among_kills",
        share(among_kills),
        "% of the limit",
    );
    // Of a few windows a mean says nothing: each may be spent at its beginning.
    if end - start > 5.0 * WINDOW {
        let later = bills.iter().filter(|bill| (start + WINDOW..end).contains(&bill.at));
        let total: i64 = later.map(|bill| bill.tokens).sum();
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
        let mean = (total as f64 * WINDOW / (end - start - WINDOW)) as i64;
        figure("budget_chaos_mean_window", share(mean), "% of the limit");
    }
    figure(
        "budget_chaos_in_flight_at_once",
        share(most_in_flight(&bills)),
        "% of the limit",
    );
    let afterwards = afterwards(&of_agents, LIMIT, end - start);
    let afterwards = most_billed(&afterwards.iter().collect::<Vec<_>>());
    figure(
        "budget_chaos_fullest_window_if_counted_afterwards",
        share(afterwards),
        "% of the limit",
    );
    assert!(
        most <= LIMIT,
        "{most} tokens in a window of {WINDOW} s, but {LIMIT} is the limit"
    );
    assert!(
        LIMIT / worst >= RATIO,
        "the limit is to be {RATIO} times what a call may cost, but that is {worst}"
    );
    assert!(
        most * 100 >= LIMIT * USABLE_PERCENT,
        "the fullest window has {most} tokens of {LIMIT}: the rest was of no use, or the limit was never felt"
    );
    assert!(
        among_kills * 2 > LIMIT,
        "among the kills the fullest window has {among_kills} tokens of {LIMIT}: nearly nothing goes on"
    );
}

/// In percent of the limit.
fn share(tokens: i64) -> String {
    // Far below 2^53.
    #[allow(clippy::cast_precision_loss)]
    let share = tokens as f64 / LIMIT as f64;
    format!("{:.1}", 100.0 * share)
}

/// Kills the leader every few seconds, and workers and gateways now and then; how many of each.
fn kill_for(system: &Kubectl, agents: &[Agent<'_>], long: Duration) -> [usize; 3] {
    let deadline = Instant::now() + long;
    let mut kills = [0; 3];
    let mut round = 0;
    while Instant::now() < deadline {
        if let Some(leader) = leading(system) {
            kill_pod(system, &leader);
            kills[0] += 1;
        }
        let agent = &agents[round * 7 % agents.len()];
        let role = ["worker", "gateway"][round % 2];
        let pod = agent.kubectl.get("pod", &agent.name);
        let struck = pod.and_then(|pod| node::strike(&pod, role, "KILL"));
        kills[1 + round % 2] += usize::from(struck.is_some());
        round += 1;
        // The rhythm of the kills is the test's own: nothing is waited for.
        std::thread::park_timeout(Duration::from_secs(RHYTHM).min(deadline.saturating_duration_since(Instant::now())));
    }
    kills
}

/// The replica that leads, when there is one.
pub fn leading(system: &Kubectl) -> Option<Value> {
    let alive = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["phase"] == "Running";
    system.list("pods", LEADER).into_iter().find(alive)
}

/// SIGKILL to a controller and deletion of its pod, so that the kubelet's back-off does not keep the next one waiting.
pub fn kill_pod(system: &Kubectl, pod: &Value) {
    node::strike(pod, "controller", "KILL");
    let name = pod["metadata"]["name"].as_str().expect("a pod has a name");
    system.run(&["delete", "pod", name, "--grace-period=0", "--force", "--wait=false"]);
}

/// One call as its server counted it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bill {
    at: f64,
    until: f64,
    tokens: i64,
    /// What the call could have cost at most, by its request, with nothing known of the calls before.
    worst: i64,
}

/// Every call that the server began, whether its answer was received or not.
fn bills(lines: &[Line]) -> Vec<Bill> {
    let ends: HashMap<_, _> = lines
        .iter()
        .filter(|line| line.event == "end")
        .map(|line| (line.id, line.at))
        .collect();
    let begins = lines.iter().filter(|line| line.event == "begin");
    let bills = begins.map(|line| Bill {
        at: line.at,
        until: ends.get(&line.id).copied().unwrap_or(line.at),
        tokens: line.used().input + line.used().output,
        worst: worst(line),
    });
    let mut bills: Vec<_> = bills.collect();
    bills.sort_by(|a, b| a.at.total_cmp(&b.at));
    bills
}

/// The gateway's own bound, but for what it knows of earlier bills.
fn worst(line: &Line) -> i64 {
    let part = |(bytes, is_message): &(i64, bool)| RequestPart {
        hash: [0; 32],
        bytes: *bytes,
        unsteady: false,
        is_message: *is_message,
    };
    let parts: Vec<_> = line.parts.iter().map(part).collect();
    input_bound(None, &parts, RequestOverhead::CHAT_COMPLETIONS) + line.limit
}

fn most_billed(bills: &[&Bill]) -> i64 {
    let spent: Vec<_> = bills.iter().map(|bill| (bill.at, bill.tokens)).collect();
    most_in_a_window(&spent, WINDOW - BLUR)
}

/// The most that lies within any window of that length; `spent` is ordered.
fn most_in_a_window(spent: &[(f64, i64)], length: f64) -> i64 {
    let (mut first, mut sum, mut most) = (0, 0, 0);
    for (at, tokens) in spent {
        sum += tokens;
        while spent[first].0 <= at - length {
            sum -= spent[first].1;
            first += 1;
        }
        most = most.max(sum);
    }
    most
}

/// The most tokens in calls that were under way at the same time: what a count of finished calls alone would miss at the
/// moment at which the limit is reached.
fn most_in_flight(bills: &[&Bill]) -> i64 {
    let starts = bills.iter().map(|bill| (bill.at, bill.tokens));
    let ends = bills.iter().map(|bill| (bill.until, -bill.tokens));
    let mut steps: Vec<_> = starts.chain(ends).collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut now = 0;
    steps.into_iter().fold(0, |most, (_, step)| {
        now += step;
        most.max(now)
    })
}

/// The same Agents under a check that counts afterwards: a call begins when the finished calls of the window are below
/// the limit. Each makes the calls that it made, each of the cost and length that it had, as fast after one another as
/// it was at its fastest; the calls in their order of begin.
fn afterwards(agents: &[Vec<Bill>], limit: i64, seconds: f64) -> Vec<Bill> {
    let fastest = |calls: &[Bill]| {
        let pauses = calls.windows(2).map(|pair| (pair[1].at - pair[0].until).max(0.0));
        pauses.fold(f64::INFINITY, f64::min)
    };
    let pauses: Vec<_> = agents.iter().map(|calls| fastest(calls)).collect();
    let lengths = agents.iter().flatten().map(|bill| bill.until - bill.at);
    let longest = lengths.fold(0.0, f64::max);
    let mut ready: Vec<_> = agents.iter().map(|_| (0.0, 0)).collect();
    let mut made: Vec<Bill> = Vec::new();
    let next = |ready: &[(f64, usize)]| {
        let those = ready
            .iter()
            .enumerate()
            .filter(|(agent, (at, _))| !agents[*agent].is_empty() && *at < seconds);
        those
            .min_by(|a, b| a.1.0.total_cmp(&b.1.0))
            .map(|(agent, (at, calls))| (agent, *at, *calls))
    };
    while let Some((agent, now, calls)) = next(&ready) {
        let recent = made.iter().rev().take_while(|bill| now < bill.at + longest + WINDOW);
        let counted = || {
            let finished = recent.clone().filter(|bill| bill.until <= now);
            finished.filter(|bill| now < bill.until + WINDOW)
        };
        if counted().map(|bill| bill.tokens).sum::<i64>() >= limit {
            // The next look is when something leaves.
            ready[agent].0 = counted().map(|bill| bill.until + WINDOW).fold(f64::INFINITY, f64::min);
            continue;
        }
        let call = agents[agent][calls % agents[agent].len()];
        let until = now + (call.until - call.at);
        made.push(Bill { at: now, until, ..call });
        ready[agent] = (until + pauses[agent], calls + 1);
    }
    made
}

#[test]
fn the_window_check_rejects_an_overspent_window() {
    let spent = [(0.0, 5), (10.0, 5), (19.9, 5), (20.0, 5)];
    assert_eq!(most_in_a_window(&spent, 20.0), 15, "what is a window old has left");
    assert_eq!(most_in_a_window(&spent, 20.1), 20);
    let calls = [bill(0.0, 2.0), bill(1.0, 3.0), bill(2.5, 4.0)];
    assert_eq!(most_in_flight(&calls.iter().collect::<Vec<_>>()), 10);
}

#[test]
fn a_check_after_the_fact_misses_calls_in_flight() {
    let calls = vec![bill(0.0, 1.0), bill(3.0, 4.0)];
    let begins = |agents: &[Vec<Bill>], limit| {
        let made = afterwards(agents, limit, 45.0);
        made.iter().map(|bill| bill.at).collect::<Vec<_>>()
    };
    // 5 tokens each second, and two of pause between; the third would begin when 10 are finished.
    assert_eq!(begins(std::slice::from_ref(&calls), 10), [0.0, 3.0, 41.0, 44.0]);
    assert_eq!(begins(std::slice::from_ref(&calls), 11), [0.0, 3.0, 6.0, 41.0, 44.0]);
    // Three at once: 15 where 5 are allowed.
    assert_eq!(
        begins(&[calls.clone(), calls.clone(), calls], 5),
        [0.0, 0.0, 0.0, 41.0, 41.0, 41.0]
    );
}

fn bill(at: f64, until: f64) -> Bill {
    Bill {
        at,
        until,
        tokens: 5,
        worst: 9,
    }
}
