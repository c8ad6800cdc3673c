//! The state of the namespace that does not depend on a peer, and its changes.

use std::net::{IpAddr, Ipv4Addr};

/// A change in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The local addresses have changed.
    Addresses,
    /// A device was added, went up or down, gained or lost its carrier (`up`), became or ceased to
    /// be a part of another one, or is gone.
    Link { ifindex: u32, up: bool, gone: bool },
    /// An interval has passed, or a refresh was requested: state without events may have changed.
    Refresh,
}

/// Local state of the namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalState {
    /// Addresses of devices that are up, with their device; not those that are tentative.
    pub(crate) addresses: Vec<(u32, IpAddr)>,
    /// Addresses of devices that are down. The kernel keeps their local IPv4 routes: it delivers
    /// datagrams to them, and drops datagrams from them.
    pub(crate) down_addresses: Vec<(u32, IpAddr)>,
    /// Broadcast addresses of devices that are up. The kernel removes the routes of others.
    pub(crate) broadcasts: Vec<Ipv4Addr>,
    /// Devices that are part of another one, with that one: a bridge, bond, team or VRF.
    pub(crate) masters: Vec<(u32, u32)>,
    /// VRFs.
    pub(crate) vrfs: Vec<u32>,
    /// Devices that are up, except loopback.
    pub(crate) up: Vec<u32>,
}
