//! TCP for one lane: packets and a time go in, packets and events come out. No I/O, no clock.

pub mod time;
