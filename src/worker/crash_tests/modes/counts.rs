//! Counts of what the schedules of the simulation have gone through.

/// What schedules have gone through.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SimulationCounts {
    pub(super) inputs: usize,
    pub(super) kills: usize,
    pub(super) lives: usize,
    pub(super) tasks: usize,
    pub(super) goals: usize,
    pub(super) rollbacks: usize,
    pub(super) calls: usize,
    pub(super) runs: usize,
    /// Loops that ended because a user had stopped them, and those of which the controller learned from a later pod.
    pub(super) stops: usize,
    pub(super) unknown_ends: usize,
    /// Calls that were denied in mode Goal, and loops that ended because of that.
    pub(super) denials: usize,
    pub(super) denied_goals: usize,
}

impl SimulationCounts {
    pub(super) fn add(&mut self, other: &Self) {
        self.inputs += other.inputs;
        self.kills += other.kills;
        self.lives += other.lives;
        self.tasks += other.tasks;
        self.goals += other.goals;
        self.rollbacks += other.rollbacks;
        self.calls += other.calls;
        self.runs += other.runs;
        self.stops += other.stops;
        self.unknown_ends += other.unknown_ends;
        self.denials += other.denials;
        self.denied_goals += other.denied_goals;
    }
}
