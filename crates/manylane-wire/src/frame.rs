//! A whole frame, parsed layer by layer as far as the layers are known.

use std::net::{IpAddr, SocketAddr};

use crate::error::{Error, Layer, Result};
use crate::ethernet::{Ethernet, HEADER_LEN, Mac, TAG_LEN, Vlan, ether_type};
use crate::ipv4::{self, Ipv4, Ipv4Header};
use crate::ipv6::{self, Ipv6, Ipv6Header};
use crate::udp::{self, Udp};

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The link layer.
    pub ethernet: Ethernet,
    /// The network layer.
    pub network: Network<'a>,
}

/// The network layer of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network<'a> {
    /// IPv4.
    Ipv4(Ipv4<'a>, Transport<'a>),
    /// IPv6.
    Ipv6(Ipv6<'a>, Transport<'a>),
    /// Any other type.
    Other(&'a [u8]),
}

/// The transport layer of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport<'a> {
    /// A whole UDP datagram.
    Udp(Udp<'a>),
    /// A fragment.
    Fragment(&'a [u8]),
    /// Any other protocol, or IPv6 with extension headers.
    Other(&'a [u8]),
}

impl<'a> Frame<'a> {
    /// Parses the layers of `bytes`.
    ///
    /// # Errors
    /// If one of its layers is malformed.
    pub fn parse(bytes: &'a [u8]) -> Result<Frame<'a>> {
        let (ethernet, rest) = Ethernet::parse(bytes)?;
        let network = match ethernet.ether_type {
            ether_type::IPV4 => {
                let ip = Ipv4::parse(rest)?;
                Network::Ipv4(ip, Transport::parse(ip.protocol, ip.is_fragment(), ip.payload)?)
            }
            ether_type::IPV6 => {
                let ip = Ipv6::parse(rest)?;
                let fragment = ip.next_header == ipv6::FRAGMENT;
                Network::Ipv6(ip, Transport::parse(ip.next_header, fragment, ip.payload)?)
            }
            _ => Network::Other(rest),
        };
        Ok(Frame { ethernet, network })
    }

    /// The UDP datagram, if it is a whole one.
    #[must_use]
    pub fn udp(&self) -> Option<Udp<'a>> {
        match self.network {
            Network::Ipv4(_, Transport::Udp(udp)) | Network::Ipv6(_, Transport::Udp(udp)) => Some(udp),
            _ => None,
        }
    }

    /// Source and destination of the UDP datagram.
    #[must_use]
    pub fn endpoints(&self) -> Option<(SocketAddr, SocketAddr)> {
        let udp = self.udp()?;
        let (source, destination) = self.addresses()?;
        Some(((source, udp.source).into(), (destination, udp.destination).into()))
    }

    /// Source and destination IP address.
    #[must_use]
    pub fn addresses(&self) -> Option<(IpAddr, IpAddr)> {
        match self.network {
            Network::Ipv4(ip, _) => Some((ip.source.into(), ip.destination.into())),
            Network::Ipv6(ip, _) => Some((ip.source.into(), ip.destination.into())),
            _ => None,
        }
    }

    /// True if the checksums of IPv4 and UDP are valid, as far as there are any.
    #[must_use]
    pub fn has_valid_checksums(&self) -> bool {
        let network = match self.network {
            Network::Ipv4(ip, _) => ip.has_valid_checksum(),
            _ => true,
        };
        let transport = match (self.udp(), self.addresses()) {
            (Some(udp), Some((source, destination))) => udp.has_valid_checksum(source, destination),
            _ => true,
        };
        network && transport
    }
}

impl<'a> Transport<'a> {
    fn parse(protocol: u8, fragment: bool, payload: &'a [u8]) -> Result<Transport<'a>> {
        if fragment {
            return Ok(Transport::Fragment(payload));
        }
        if protocol != udp::PROTOCOL {
            return Ok(Transport::Other(payload));
        }
        Udp::parse(payload).map(Transport::Udp)
    }
}

/// Length of the IP and UDP headers in bytes, without options.
#[must_use]
#[inline]
pub const fn ip_udp_len(is_ipv6: bool) -> usize {
    udp::HEADER_LEN + if is_ipv6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN }
}

/// A frame with a UDP datagram, for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpFrame<'a> {
    /// Source MAC address.
    pub source_mac: Mac,
    /// Destination MAC address.
    pub destination_mac: Mac,
    /// VLAN tags, outer first.
    pub vlans: [Option<Vlan>; 2],
    /// Source; of the same family as `destination`.
    pub source: SocketAddr,
    /// Destination.
    pub destination: SocketAddr,
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// IP identification, if routers may fragment the packet; only for IPv4.
    pub fragment_id: Option<u16>,
    /// The payload.
    pub payload: &'a [u8],
}

impl UdpFrame<'_> {
    /// An empty datagram, untagged, with a TTL of 64, that routers may not fragment.
    #[must_use]
    pub fn new(
        source_mac: Mac,
        destination_mac: Mac,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> UdpFrame<'static> {
        UdpFrame {
            source_mac,
            destination_mac,
            vlans: [None; 2],
            source,
            destination,
            traffic_class: 0,
            ttl: 64,
            fragment_id: None,
            payload: &[],
        }
    }

    /// Length of the frame in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        let tags = TAG_LEN * self.vlans.iter().flatten().count();
        HEADER_LEN + tags + ip_udp_len(self.destination.is_ipv6()) + self.payload.len()
    }

    /// Writes the frame with valid checksums, and returns its length.
    ///
    /// # Errors
    /// If it does not fit `bytes`, or the payload does not fit a datagram; `bytes` may then be
    /// partly written.
    pub fn write(&self, bytes: &mut [u8]) -> Result<usize> {
        self.write_headers(self.write_payload(bytes)?)?;
        Ok(self.len())
    }

    /// As [`write`](Self::write), but leaves the UDP checksum to a device: see
    /// [`write_headers_partial_checksum`](Self::write_headers_partial_checksum).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn write_partial_checksum(&self, bytes: &mut [u8]) -> Result<(u16, u16)> {
        self.write_headers_partial_checksum(self.write_payload(bytes)?)
    }

    /// Writes the payload, and returns the bytes in front of it.
    fn write_payload<'b>(&self, bytes: &'b mut [u8]) -> Result<&'b mut [u8]> {
        let (length, there) = (self.len(), bytes.len());
        let needs = Error::Truncated { layer: Layer::Ethernet, needed: length, there };
        let frame = bytes.get_mut(..length).ok_or(needs)?;
        let (head, payload) = frame.split_at_mut(length - self.payload.len());
        payload.copy_from_slice(self.payload);
        Ok(head)
    }

    /// Writes everything but the payload, which is, or will be, right behind `head`. `head` has
    /// the length of the headers.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn write_headers(&self, head: &mut [u8]) -> Result<()> {
        let datagram = self.write_network(head)?;
        udp::write_header(datagram, self.source, self.destination, self.payload)
    }

    /// As [`write_headers`](Self::write_headers), but leaves the UDP checksum to a device. Returns
    /// the offset at which the device starts to sum, and the offset of the result relative to
    /// that.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    #[expect(clippy::cast_possible_truncation, reason = "offsets in headers, which have less than 100 bytes")]
    pub fn write_headers_partial_checksum(&self, head: &mut [u8]) -> Result<(u16, u16)> {
        let start = self.len() - self.payload.len() - udp::HEADER_LEN;
        let datagram = self.write_network(head)?;
        udp::write_header_partial_checksum(datagram, self.source, self.destination, self.payload.len())?;
        Ok((start as u16, udp::CHECKSUM_OFFSET as u16))
    }

    /// Writes the headers in front of UDP, and returns the rest.
    fn write_network<'h>(&self, head: &'h mut [u8]) -> Result<&'h mut [u8]> {
        let ethernet = Ethernet {
            destination: self.destination_mac,
            source: self.source_mac,
            vlans: self.vlans,
            ether_type: if self.destination.is_ipv4() { ether_type::IPV4 } else { ether_type::IPV6 },
        };
        let rest = ethernet.write(head)?;
        let payload = udp::HEADER_LEN + self.payload.len();
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => Ipv4Header {
                traffic_class: self.traffic_class,
                id: self.fragment_id.unwrap_or(0),
                dont_fragment: self.fragment_id.is_none(),
                ttl: self.ttl,
                protocol: udp::PROTOCOL,
                source,
                destination,
            }
            .write(rest, payload),
            (IpAddr::V6(source), IpAddr::V6(destination)) => Ipv6Header {
                traffic_class: self.traffic_class,
                flow_label: 0,
                next_header: udp::PROTOCOL,
                hop_limit: self.ttl,
                source,
                destination,
            }
            .write(rest, payload),
            _ => Err(Error::MixedFamilies),
        }
    }
}
