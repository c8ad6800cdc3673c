//! Families of generic netlink: ethtool, devices.

use std::io;

use manylane_sys::netlink::{AttrReader, Attrs, NETLINK_GENERIC, NetlinkSocket, u16_at};

/// A family of generic netlink.
#[derive(Debug)]
pub(crate) struct Family {
    socket: NetlinkSocket,
    id: u16,
}

impl Family {
    /// Finds a family by its name.
    pub(crate) fn open(name: &str) -> io::Result<Self> {
        const CONTROL: u16 = 16;
        const GET_FAMILY: u8 = 3;
        const FAMILY_ID: u16 = 1;
        const FAMILY_NAME: u16 = 2;
        let mut family = Self { socket: NetlinkSocket::open(NETLINK_GENERIC)?, id: CONTROL };
        // Drivers explain in a text what they refuse.
        family.socket.enable_error_texts();
        let mut id = None;
        family.request(GET_FAMILY, &Attrs::default().text(FAMILY_NAME, name), 0, |attrs| {
            id = attrs.find(FAMILY_ID).and_then(|value| u16_at(value, 0));
        })?;
        family.id = id.ok_or(io::ErrorKind::NotFound)?;
        Ok(family)
    }

    /// Sends a request, and passes the attributes of each reply to `each`. `flags` as for
    /// [`NetlinkSocket::request`].
    pub(crate) fn request(
        &mut self,
        command: u8,
        attrs: &Attrs,
        flags: i32,
        mut each: impl FnMut(AttrReader<'_>),
    ) -> io::Result<()> {
        let body = [&[command, 1, 0, 0][..], attrs.as_bytes()].concat();
        self.socket.request(self.id, flags, &body, |_, reply| each(AttrReader::after(reply, 4)))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netlink_queries_are_answered() {
        assert!(Family::open("nlctrl").is_ok());
        let err = Family::open("no-such-family").unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::NotFound);
    }
}
