//! Which traces are exported, by `OTEL_TRACES_SAMPLER`.
//!
//! The decision depends only on the trace id, so that all spans of a turn share it, also over restarts.

/// The samplers of the OpenTelemetry SDKs. A turn has no parent, so `parentbased_*` samplers decide as their root does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TraceSampler {
    /// All traces.
    AlwaysOn,
    /// No trace.
    AlwaysOff,
    /// This share of the traces, from 0 to 1.
    Ratio(f64),
}

impl TraceSampler {
    /// Parses the sampler and its argument. `None`: the sampler is unknown, or its ratio is not a number from 0 to 1.
    pub(crate) fn parse(name: &str, argument: Option<&str>) -> Option<Self> {
        match name.trim() {
            "always_on" | "parentbased_always_on" => Some(Self::AlwaysOn),
            "always_off" | "parentbased_always_off" => Some(Self::AlwaysOff),
            "traceidratio" | "parentbased_traceidratio" => {
                let ratio: f64 = argument.map_or(Ok(1.0), |text| text.trim().parse()).ok()?;
                (0.0..=1.0).contains(&ratio).then_some(Self::Ratio(ratio))
            }
            _ => None,
        }
    }

    /// Whether the trace is exported.
    pub(crate) fn samples(self, trace_id: &[u8]) -> bool {
        match self {
            Self::AlwaysOn => true,
            Self::AlwaysOff => false,
            // Like the SDKs: the last eight bytes as a number of 63 bits.
            Self::Ratio(ratio) => {
                let last = trace_id.last_chunk().copied().map_or(u64::MAX, u64::from_be_bytes) >> 1;
                ratio >= 1.0 || to_float(last) < ratio * to_float(u64::MAX >> 1)
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no 64 bits of precision")]
fn to_float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::ids::TurnName;

    #[rstest]
    #[case("always_on", None, Some(TraceSampler::AlwaysOn))]
    #[case("parentbased_always_off", None, Some(TraceSampler::AlwaysOff))]
    #[case("traceidratio", Some("0.25"), Some(TraceSampler::Ratio(0.25)))]
    #[case("parentbased_traceidratio", None, Some(TraceSampler::Ratio(1.0)))]
    #[case("traceidratio", Some("1.01"), None)]
    #[case("traceidratio", Some("-0.01"), None)]
    #[case("traceidratio", Some("half"), None)]
    #[case("jaeger_remote", None, None)]
    fn samplers_are_named_as_in_the_sdks(
        #[case] name: &str,
        #[case] argument: Option<&str>,
        #[case] expected: Option<TraceSampler>,
    ) {
        assert_eq!(TraceSampler::parse(name, argument), expected);
    }

    #[test]
    fn a_ratio_is_met_within_two_percent_and_its_ends_exactly() {
        let sampled = |sampler: TraceSampler| {
            let traces = (1..=10_000).map(|turn| {
                TurnName {
                    agent: "uid",
                    member: 0,
                    turn,
                }
                .trace_id()
            });
            traces.filter(|trace| sampler.samples(trace)).count()
        };
        assert_eq!(sampled(TraceSampler::Ratio(0.0)), 0);
        assert_eq!(sampled(TraceSampler::Ratio(1.0)), 10_000);
        assert!((2_300..2_700).contains(&sampled(TraceSampler::Ratio(0.25))));
    }
}
