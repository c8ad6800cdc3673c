//! The lender, message by message, with the test in place of a program.

use std::fmt::Write as _;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use manylane_sys::lend::{Fds, Message};
use manylane_sys::netns::NetNs;

use super::Lender;
use crate::io::xdp::route::tests::{can_make_namespaces, run, try_ip, until};
use crate::vlan::Vlan;

/// A namespace with the device `near`.
fn a_device() -> NetNs {
    let ours = NetNs::create().unwrap();
    let lines = "link set lo up\nlink add near type veth peer name far\n\
        address add 10.9.0.1/24 dev near\nlink set near up\nlink set far up\n";
    assert!(try_ip(&ours, lines));
    ours
}

/// Asks for queues for a socket that is bound to this port: its end of the loan, and the socket.
fn ask(lender: &mut Lender, port: u16) -> (OwnedFd, UdpSocket) {
    let socket = UdpSocket::bind(("0.0.0.0", port)).unwrap();
    let end = lender.ticket.connect(Duration::from_secs(20)).unwrap();
    Message::Ask(lender.ticket.secret).send(end.as_fd(), &[socket.as_fd()]).unwrap();
    lender.let_in();
    lender.hear_visitor(0);
    lender.answer();
    let Some(Message::Done(queues)) = Message::receive(end.as_fd(), &mut Fds::default()).unwrap() else {
        panic!("refused");
    };
    for _ in 0..queues {
        let message = Message::receive(end.as_fd(), &mut Fds::default()).unwrap();
        assert!(matches!(message, Some(Message::Queue(_))), "{message:?}");
    }
    (end, socket)
}

/// Whether the lender does what the holder of the loan at that place says.
fn obeys(lender: &mut Lender, at: usize, end: &OwnedFd, order: Message) -> bool {
    order.send(end.as_fd(), &[]).unwrap();
    lender.hear_holder(at);
    match Message::receive(end.as_fd(), &mut Fds::default()).unwrap() {
        Some(Message::Done(0)) => true,
        Some(Message::Refused(_)) => false,
        other => panic!("{other:?}"),
    }
}

/// Addresses that lead to the loan at that place.
fn led_to(lender: &Lender, at: usize) -> usize {
    let [(_, number)] = lender.loans[at].numbers[..] else { panic!("one device") };
    lender.devices[0].device.led_to(number)
}

#[test]
fn netns_no_port_leads_to_a_loan_that_is_not_open() {
    /// Two sockets with so many addresses each are more than the map of ports has room for; so many once more are more
    /// than that of addresses has.
    const MANY: usize = 2500;
    if !can_make_namespaces("netns_no_port_leads_to_a_loan_that_is_not_open") {
        return;
    }
    let ours = a_device();
    let add = |from: usize| {
        let mut lines = String::new();
        for n in from..from + MANY {
            writeln!(lines, "address add 10.10.{}.{}/32 dev lo", n / 250, n % 250 + 1).unwrap();
        }
        assert!(try_ip(&ours, &lines));
    };
    add(0);
    run(&ours, || {
        let mut lender = Lender::open(Some(&["near".into()]), |_| None).unwrap();
        let (first, _one) = ask(&mut lender, 7001);
        let (second, other) = ask(&mut lender, 7002);
        assert!(obeys(&mut lender, 0, &first, Message::Open));
        let led = led_to(&lender, 0);
        assert!(led > MANY, "{led}");
        assert!(!obeys(&mut lender, 1, &second, Message::Open));
        assert_eq!((led_to(&lender, 0), led_to(&lender, 1)), (led, 0));
        // An order is given once. What the map has room for again is the next one's.
        drop((second, other));
        lender.hear_holder(1);
        let (second, _other) = ask(&mut lender, 7002);
        assert!(obeys(&mut lender, 0, &first, Message::Close));
        assert!(obeys(&mut lender, 1, &second, Message::Open));
        assert_eq!((led_to(&lender, 0), led_to(&lender, 1)), (0, led));
        add(MANY);
        until(|| lender.routes.local_addresses().len() > 2 * MANY);
        assert!(obeys(&mut lender, 1, &second, Message::Close));
        // The first one ends, and its place is the second one's.
        drop(first);
        lender.hear_holder(0);
        let (third, _third) = ask(&mut lender, 7003);
        assert!(!obeys(&mut lender, 1, &third, Message::Open));
        assert_eq!((led_to(&lender, 0), led_to(&lender, 1)), (0, 0));
    });
}

#[test]
fn netns_vlans_of_a_socket_that_was_refused_lead_nowhere() {
    if !can_make_namespaces("netns_vlans_of_a_socket_that_was_refused_lead_nowhere") {
        return;
    }
    run(&a_device(), || {
        let lender = Lender::open(Some(&["near".into()]), |_| None).unwrap();
        let device = &lender.devices[0].device;
        let vlan = |n: u16| Vlan::stacked(1 + n / 4000, 1 + n % 4000).unwrap();
        // One more than the map has room for.
        let many: Vec<Vlan> = (0..4097).map(vlan).collect();
        assert!(device.register(&many).is_err());
        let number = device.register(&many[..1]).unwrap();
        assert_eq!(device.vlans_to(number), 1);
    });
}
