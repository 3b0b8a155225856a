//! Which addresses Sensors and Agents may connect to. Sensors may connect only to public addresses, and the gateway of
//! an Agent also to private networks, where many model and tool servers are, but not to metadata servers; the
//! operator's configuration can change both.
//!
//! A user who may write a Sensor or an Agent must not use it to reach what only the cluster or the node may reach.
//! Names are checked after they are resolved, and the connection goes to the same address that was checked.

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

#[cfg(test)]
mod text_tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Ranges that are denied unless allowed: loopback and link-local addresses (metadata servers are there), private
/// networks (pods and Services have such addresses), and addresses that are not unicast.
const CLOSED: [&str; 19] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/128",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    "64:ff9b:1::/48",
];

/// Ranges that are denied to Agents unless allowed: link-local addresses and metadata servers, which hand out
/// credentials of the node, and addresses that are not unicast.
const CLOSED_TO_AGENTS: [&str; 10] = [
    "0.0.0.0/8",
    "100.100.100.200/32",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/128",
    "fd00:ec2::/32",
    "fe80::/10",
    "ff00::/8",
];

/// A CIDR range, such as `10.96.0.0/12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    network: u128,
    bits: u32,
    four: bool,
}

/// A string is not a CIDR range.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("'{0}' is not a CIDR range; write it as 10.96.0.0/12 or fd00::/8")]
pub struct CidrError(String);

/// The policy denies an address.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum AddressError {
    /// The address is in a range that is denied to Sensors.
    #[error("Sensors may not connect to {0}: ask an administrator to add it to egress.allowedCIDRs in the chart")]
    Address(IpAddr),
    /// All addresses of a host are denied to Sensors.
    #[error(
        "Sensors may not connect to any address of the host, such as {0}: ask an administrator to add it to egress.allowedCIDRs in the chart"
    )]
    Host(IpAddr),
    /// The address is in a range that is denied to Agents.
    #[error("Agents may not connect to {0}: ask an administrator to add it to egress.agents.allowedCIDRs in the chart")]
    AgentAddress(IpAddr),
    /// All addresses of a host are denied to Agents.
    #[error(
        "Agents may not connect to any address of the host, such as {0}: ask an administrator to add it to egress.agents.allowedCIDRs in the chart"
    )]
    AgentHost(IpAddr),
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let wrong = || CidrError(text.into());
        let (address, bits) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits: u32 = bits.parse().map_err(|_| wrong())?;
        let (network, width) = number(address);
        if bits > width {
            return Err(wrong());
        }
        let cidr = Self {
            network,
            bits,
            four: address.is_ipv4(),
        };
        Ok(Self {
            network: network & cidr.mask(),
            ..cidr
        })
    }
}

impl Cidr {
    fn mask(self) -> u128 {
        let (width, all) = if self.four {
            (32, u128::from(u32::MAX))
        } else {
            (128, u128::MAX)
        };
        // A shift by the full width overflows.
        all.checked_shl(width - self.bits).unwrap_or(0) & all
    }

    /// Whether the range contains this address.
    #[must_use]
    pub fn contains(self, address: IpAddr) -> bool {
        self.four == address.is_ipv4() && number(address).0 & self.mask() == self.network
    }
}

fn number(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(four) => (u128::from(u32::from(four)), 32),
        IpAddr::V6(six) => (u128::from(six), 128),
    }
}

/// Which addresses may be connected to. `denied` takes precedence over `allowed`, and `allowed` over the built-in
/// `closed` ranges; all other addresses are open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressPolicy {
    allowed: Vec<Cidr>,
    denied: Vec<Cidr>,
    closed: Vec<Cidr>,
    of_agents: bool,
}

impl AddressPolicy {
    /// The policy of Sensors.
    #[must_use]
    pub fn new(allowed: Vec<Cidr>, denied: Vec<Cidr>) -> Self {
        Self {
            allowed,
            denied,
            closed: CLOSED.iter().filter_map(|range| range.parse().ok()).collect(),
            of_agents: false,
        }
    }

    /// The policy of Agents. `private`: private networks and the pod itself are open too.
    #[must_use]
    pub fn of_agents(allowed: Vec<Cidr>, denied: Vec<Cidr>, private: bool) -> Self {
        let closed: &[&str] = if private { &CLOSED_TO_AGENTS } else { &CLOSED };
        Self {
            allowed,
            denied,
            closed: closed.iter().filter_map(|range| range.parse().ok()).collect(),
            of_agents: true,
        }
    }

    pub fn check(&self, address: IpAddr) -> Result<(), AddressError> {
        let real = real(address);
        let is_in = |ranges: &[Cidr]| {
            ranges
                .iter()
                .any(|range| range.contains(real) || range.contains(address))
        };
        if is_in(&self.denied) || (is_in(&self.closed) && !is_in(&self.allowed)) {
            return Err(if self.of_agents {
                AddressError::AgentAddress(address)
            } else {
                AddressError::Address(address)
            });
        }
        Ok(())
    }

    /// Checks the host of `url` if it is an address; names are checked once resolved.
    pub fn check_url(&self, url: &Url) -> Result<(), AddressError> {
        let host = url.host_str().unwrap_or_default();
        match host.trim_start_matches('[').trim_end_matches(']').parse() {
            Ok(address) => self.check(address),
            Err(_) => Ok(()),
        }
    }

    /// The open addresses of a host; an error if it has only denied ones.
    pub fn filter(&self, found: impl Iterator<Item = SocketAddr>) -> Result<Vec<SocketAddr>, AddressError> {
        let mut denied = None;
        let mut open = Vec::new();
        for address in found {
            match self.check(address.ip()) {
                Ok(()) => open.push(address),
                Err(_) => denied = denied.or(Some(address.ip())),
            }
        }
        match denied {
            Some(address) if open.is_empty() && self.of_agents => Err(AddressError::AgentHost(address)),
            Some(address) if open.is_empty() => Err(AddressError::Host(address)),
            _ => Ok(open),
        }
    }
}

/// The IPv4 address embedded in an IPv6 address (mapped, NAT64, 6to4), which a connection would reach.
fn real(address: IpAddr) -> IpAddr {
    let IpAddr::V6(six) = address else {
        return address;
    };
    let four = |high: u16, low: u16| IpAddr::V4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match six.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] if six != Ipv6Addr::LOCALHOST => four(high, low),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => four(high, low),
        _ => address,
    }
}

/// A DNS resolver that returns only open addresses.
pub struct FilteringResolver(pub Arc<AddressPolicy>);

impl Resolve for FilteringResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let open: Addrs = Box::new(policy.filter(found)?.into_iter());
            Ok(open)
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn policy(allowed: &[&str], denied: &[&str]) -> AddressPolicy {
        let parse = |ranges: &[&str]| ranges.iter().map(|range| range.parse().unwrap()).collect();
        AddressPolicy::new(parse(allowed), parse(denied))
    }

    #[rstest]
    #[case::loopback("127.0.0.1")]
    #[case::all_of_loopback("127.255.255.254")]
    #[case::unspecified("0.0.0.0")]
    #[case::metadata("169.254.169.254")]
    #[case::metadata_of_azure("168.63.129.16")]
    #[case::metadata_of_alibaba("100.100.100.200")]
    #[case::metadata_over_ipv6("fd00:ec2::254")]
    #[case::a_service("10.96.0.1")]
    #[case::the_last_of_a_range("172.31.255.255")]
    #[case::loopback_over_ipv6("::1")]
    #[case::link_local_over_ipv6("fe80::1")]
    #[case::mapped("::ffff:169.254.169.254")]
    #[case::compatible("::127.0.0.1")]
    #[case::translated("64:ff9b::a9fe:a9fe")]
    #[case::six_to_four("2002:7f00:1::")]
    #[case::multicast("224.0.0.1")]
    #[case::broadcast("255.255.255.255")]
    fn addresses_that_only_the_cluster_or_the_node_may_reach_are_denied(#[case] address: &str) {
        let address = address.parse().unwrap();
        assert_eq!(policy(&[], &[]).check(address), Err(AddressError::Address(address)));
    }

    #[rstest]
    #[case::before_loopback("126.255.255.255")]
    #[case::after_loopback("128.0.0.0")]
    #[case::before_private("172.15.255.255")]
    #[case::after_private("172.32.0.0")]
    #[case::before_shared("100.63.255.255")]
    #[case::after_shared("100.128.0.0")]
    #[case::over_ipv6("2606:4700::1111")]
    #[case::mapped("::ffff:1.1.1.1")]
    fn addresses_next_to_closed_ranges_are_open(#[case] address: &str) {
        assert_eq!(policy(&[], &[]).check(address.parse().unwrap()), Ok(()));
    }

    #[rstest]
    #[case::metadata("169.254.169.254", false, false)]
    #[case::metadata_of_azure("168.63.129.16", false, false)]
    #[case::metadata_of_alibaba("100.100.100.200", false, false)]
    #[case::metadata_over_ipv6("fd00:ec2::254", false, false)]
    #[case::mapped("::ffff:169.254.169.254", false, false)]
    #[case::link_local_over_ipv6("fe80::1", false, false)]
    #[case::multicast("224.0.0.1", false, false)]
    #[case::a_service("10.96.0.1", true, false)]
    #[case::the_pod_itself("127.0.0.1", true, false)]
    #[case::a_service_over_ipv6("fd12::1", true, false)]
    #[case::shared("100.100.100.201", true, false)]
    #[case::the_world("1.1.1.1", true, true)]
    fn agents_reach_private_networks_where_that_is_open_and_metadata_servers_never(
        #[case] address: &str,
        #[case] open: bool,
        #[case] open_without_private: bool,
    ) {
        let address = address.parse().unwrap();
        let check = |private| AddressPolicy::of_agents(vec![], vec![], private).check(address);
        assert_eq!(check(true).is_ok(), open);
        assert_eq!(check(false).is_ok(), open_without_private);
        let range = |text: String| vec![text.parse().unwrap()];
        let one = format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 });
        let allowed = AddressPolicy::of_agents(range(one.clone()), vec![], false);
        assert_eq!(allowed.check(address), Ok(()));
        let denied = AddressPolicy::of_agents(vec![], range(one), true);
        assert_eq!(denied.check(address), Err(AddressError::AgentAddress(address)));
        let words = AddressError::AgentAddress(address).to_string();
        assert!(words.contains("egress.agents.allowedCIDRs"), "{words}");
    }

    #[test]
    fn an_allowed_range_opens_only_itself_and_a_denied_range_takes_precedence() {
        let policy = policy(&["10.0.0.0/8"], &["10.1.0.0/16", "1.1.1.1/32"]);
        assert_eq!(policy.check("10.0.0.1".parse().unwrap()), Ok(()));
        assert_eq!(policy.check("::ffff:10.0.0.1".parse().unwrap()), Ok(()));
        assert!(policy.check("10.1.0.1".parse().unwrap()).is_err());
        assert!(policy.check("1.1.1.1".parse().unwrap()).is_err());
        assert!(policy.check("192.168.0.1".parse().unwrap()).is_err());
    }

    #[test]
    fn only_the_open_addresses_of_a_host_are_used() {
        let found = |addresses: &[&str]| -> Vec<SocketAddr> {
            addresses
                .iter()
                .map(|address| SocketAddr::new(address.parse().unwrap(), 0))
                .collect()
        };
        let policy = policy(&[], &[]);
        let both = found(&["127.0.0.1", "1.1.1.1"]);
        assert_eq!(policy.filter(both.into_iter()), Ok(found(&["1.1.1.1"])));
        let only = policy.filter(found(&["127.0.0.1"]).into_iter());
        assert_eq!(only, Err(AddressError::Host("127.0.0.1".parse().unwrap())));
    }

    #[rstest]
    #[case("http://127.0.0.1/x", false)]
    #[case("http://0x7f.1/", false)]
    #[case("http://2130706433/", false)]
    #[case("http://[::1]:8080/", false)]
    #[case("http://1.1.1.1/", true)]
    #[case("http://a.name/", true)]
    fn an_address_in_a_url_is_checked_however_it_is_written(#[case] url: &str, #[case] open: bool) {
        assert_eq!(policy(&[], &[]).check_url(&url.parse().unwrap()).is_ok(), open);
    }

    #[rstest]
    #[case("10.0.0.0")]
    #[case("10.0.0.0/33")]
    #[case("::/129")]
    #[case("x/8")]
    #[case("10.0.0.0/-1")]
    fn an_invalid_range_is_reported_as_such(#[case] text: &str) {
        assert_eq!(text.parse::<Cidr>(), Err(CidrError(text.into())));
    }

    #[test]
    fn a_range_of_no_bits_is_everything_of_its_family() {
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("255.1.2.3".parse().unwrap()));
        assert!(!all.contains("::1".parse().unwrap()));
        assert!("::/0".parse::<Cidr>().unwrap().contains("ff00::1".parse().unwrap()));
    }
}
