//! stub
use crate::time::Time;
use std::collections::BTreeSet;
/// stub
#[derive(Debug, Default)]
pub struct Wheel {
    by_key: std::collections::HashMap<u32, Time>,
    by_time: BTreeSet<(Time, u32)>,
}
impl Wheel {
    pub fn new(_: Time) -> Wheel {
        Wheel::default()
    }
    pub fn set(&mut self, key: u32, at: Time) {
        self.cancel(key);
        self.by_key.insert(key, at);
        self.by_time.insert((at, key));
    }
    pub fn cancel(&mut self, key: u32) {
        if let Some(at) = self.by_key.remove(&key) {
            self.by_time.remove(&(at, key));
        }
    }
    pub fn pop(&mut self, now: Time) -> Option<u32> {
        let &(at, key) = self.by_time.first()?;
        (at <= now).then(|| {
            self.cancel(key);
            key
        })
    }
    pub fn next(&self) -> Option<Time> {
        self.by_time.first().map(|&(at, _)| at)
    }
}
