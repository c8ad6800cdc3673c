//! The header of the PROXY protocol, by which a server learns the client's address
//! (<https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>).

use std::net::SocketAddr;
use std::str::FromStr;

/// A version of the PROXY protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeader {
    /// A line of text (section 2.1).
    V1,
    /// Binary (section 2.2).
    V2,
}

impl FromStr for ProxyHeader {
    type Err = String;

    fn from_str(text: &str) -> Result<ProxyHeader, String> {
        match text {
            "v1" => Ok(ProxyHeader::V1),
            "v2" => Ok(ProxyHeader::V2),
            _ => Err("expected v1 or v2".into()),
        }
    }
}

impl ProxyHeader {
    /// The header for a connection of `client` to `local`.
    #[must_use]
    pub fn encode(self, client: SocketAddr, local: SocketAddr) -> Vec<u8> {
        match self {
            ProxyHeader::V1 => {
                let family = if client.is_ipv4() { "TCP4" } else { "TCP6" };
                let (from, to) = (client.ip(), local.ip());
                format!("PROXY {family} {from} {to} {} {}\r\n", client.port(), local.port()).into_bytes()
            }
            ProxyHeader::V2 => encode_v2(client, local),
        }
    }
}

fn encode_v2(client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
    const VERSION_2_PROXY: u8 = 0x21;
    const TCP_IPV4: u8 = 0x11;
    const TCP_IPV6: u8 = 0x21;
    let mut header = SIGNATURE.to_vec();
    let mut push = |family, addresses: &[&[u8]]| {
        let length: usize = addresses.iter().map(|address| address.len()).sum::<usize>() + 4;
        header.extend([VERSION_2_PROXY, family, 0, length as u8]);
        addresses.iter().for_each(|address| header.extend_from_slice(address));
    };
    match (client, local) {
        (SocketAddr::V4(client), SocketAddr::V4(local)) => {
            push(TCP_IPV4, &[&client.ip().octets(), &local.ip().octets()]);
        }
        (client, local) => {
            let octets = |address: SocketAddr| match address {
                SocketAddr::V4(address) => address.ip().to_ipv6_mapped().octets(),
                SocketAddr::V6(address) => address.ip().octets(),
            };
            push(TCP_IPV6, &[&octets(client), &octets(local)]);
        }
    }
    header.extend(client.port().to_be_bytes());
    header.extend(local.port().to_be_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> (SocketAddr, SocketAddr) {
        ("192.168.0.1:56324".parse().unwrap(), "192.168.0.11:443".parse().unwrap())
    }

    #[test]
    fn text_is_that_of_the_specification() {
        let (client, local) = addresses();
        let line = ProxyHeader::V1.encode(client, local);
        assert_eq!(line, b"PROXY TCP4 192.168.0.1 192.168.0.11 56324 443\r\n");
        let (client, local) = ("[fd00::1]:1".parse().unwrap(), "[fd00::2]:2".parse().unwrap());
        assert_eq!(ProxyHeader::V1.encode(client, local), b"PROXY TCP6 fd00::1 fd00::2 1 2\r\n");
    }

    #[test]
    fn binary_has_the_lengths_of_its_family() {
        let (client, local) = addresses();
        let header = ProxyHeader::V2.encode(client, local);
        assert_eq!(header[..12], *b"\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a");
        assert_eq!(header[12..16], [0x21, 0x11, 0, 12]);
        assert_eq!(header[16..], [192, 168, 0, 1, 192, 168, 0, 11, 0xdc, 0x04, 0x01, 0xbb]);
        let (client, local) = ("[fd00::1]:1".parse().unwrap(), "[fd00::2]:2".parse().unwrap());
        let header = ProxyHeader::V2.encode(client, local);
        assert_eq!((header[13], header[15], header.len()), (0x21, 36, 16 + 36));
    }
}
