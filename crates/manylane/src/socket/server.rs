//! Events for the loop of `serve`.

use std::sync::{Mutex, PoisonError, mpsc};

use crate::error::Result;
use crate::lane::Lane;

/// An event for the loop of `serve`.
pub(crate) enum Event {
    /// A lane was added: give it a thread.
    Run(Box<Lane>),
    /// The thread of a lane has ended.
    Ended(Result<()>),
}

/// The sender to the loop of `serve`, while it runs.
#[derive(Default)]
pub(crate) struct Server(Mutex<Option<mpsc::Sender<Event>>>);

impl Server {
    pub(crate) fn set(&self, events: Option<mpsc::Sender<Event>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = events;
    }

    pub(super) fn events(&self) -> Option<mpsc::Sender<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
