//! The errors of denied addresses and invalid ranges, as users read them.

use std::net::{IpAddr, Ipv4Addr};

use agentloop_texts::TextRows;

use super::{AddressError, Cidr};

#[test]
fn the_texts_of_addresses() {
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let mut rows: TextRows = Vec::new();
    rows.extend(variants!(
        "Addresses",
        [
            AddressError::Address(address),
            AddressError::Host(address),
            AddressError::AgentAddress(address),
            AddressError::AgentHost(address),
        ]
    ));
    let invalid = "10.0.0.0/99".parse::<Cidr>().unwrap_err();
    rows.push(text!("Addresses", "CidrError", invalid));
    assert_texts!("egress", "Errors of addresses", rows);
}
