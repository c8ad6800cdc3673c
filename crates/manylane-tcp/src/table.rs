//! The connections of a lane: by their place, and by their flow.

use hashbrown::HashTable;

use crate::connection::Phase;
use crate::event::Id;
use crate::flow::Flow;
use crate::secret::Secret;

/// A place for a connection. Its generation counts how many had it.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    /// Events of the connection that the application has not taken yet.
    events: u32,
    phase: Option<Phase>,
}

/// Connections. Nothing is allocated once there have been as many at a time.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    index: HashTable<u32>,
    max: usize,
}

impl Table {
    pub(crate) fn new(max: usize) -> Table {
        Table {
            slots: Vec::new(),
            free: Vec::new(),
            index: HashTable::new(),
            max: max.min(u32::MAX as usize),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.max
    }

    /// Adds a connection whose flow has none. `None` if there are too many.
    pub(crate) fn add(&mut self, secret: &Secret, phase: Phase) -> Option<Id> {
        if self.is_full() {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::default());
                u32::try_from(self.slots.len() - 1).ok()?
            }
        };
        let hash = secret.hash(phase.flow());
        let slot = self.slots.get_mut(index as usize)?;
        slot.phase = Some(phase);
        slot.events = 0;
        let generation = slot.generation;
        let slots = &self.slots;
        self.index.insert_unique(hash, index, |index| {
            slots
                .get(*index as usize)
                .and_then(|slot| slot.phase.as_ref())
                .map_or(0, |phase| secret.hash(phase.flow()))
        });
        Some(Id { index, generation })
    }

    /// Removes a connection.
    pub(crate) fn remove(&mut self, secret: &Secret, index: u32) -> Option<Phase> {
        let slot = self.slots.get_mut(index as usize)?;
        let phase = slot.phase.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        if let Ok(entry) = self.index.find_entry(secret.hash(phase.flow()), |other| *other == index) {
            entry.remove();
        }
        self.free.push(index);
        Some(phase)
    }

    /// The place of the connection of a flow.
    pub(crate) fn find(&self, secret: &Secret, flow: &Flow) -> Option<u32> {
        let is_it = |index: &u32| self.phase(*index).is_some_and(|phase| phase.flow() == flow);
        self.index.find(secret.hash(flow), is_it).copied()
    }

    pub(crate) fn phase(&self, index: u32) -> Option<&Phase> {
        self.slots.get(index as usize)?.phase.as_ref()
    }

    pub(crate) fn phase_mut(&mut self, index: u32) -> Option<&mut Phase> {
        self.slots.get_mut(index as usize)?.phase.as_mut()
    }

    /// The id of the connection at a place.
    pub(crate) fn id(&self, index: u32) -> Option<Id> {
        let slot = self.slots.get(index as usize).filter(|slot| slot.phase.is_some())?;
        Some(Id { index, generation: slot.generation })
    }

    /// Makes the id of the connection at a place invalid. Returns how many events wait under it.
    pub(crate) fn renew(&mut self, index: u32) -> u32 {
        let Some(slot) = self.slots.get_mut(index as usize) else { return 0 };
        slot.generation = slot.generation.wrapping_add(1);
        std::mem::take(&mut slot.events)
    }

    /// Counts the events that wait for a connection.
    pub(crate) fn events_mut(&mut self, id: Id) -> Option<&mut u32> {
        let slot = self.slots.get_mut(id.index as usize)?;
        (slot.phase.is_some() && slot.generation == id.generation).then_some(&mut slot.events)
    }

    /// The place of an id, if its connection still is.
    pub(crate) fn place(&self, id: Id) -> Option<u32> {
        (self.id(id.index)? == id).then_some(id.index)
    }
}
