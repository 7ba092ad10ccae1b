//! Guards against a checker that cries wolf, or sleeps. Each story is told twice: with the edge
//! missing, when exactly the hazard it is about must be reported, and with the edge in place, when
//! nothing may be. Random programs are then judged by a naive oracle that shares no code with the
//! checker; both must say the same about every record.

#[cfg(test)]
#[path = "hazard/bounds.rs"]
mod bounds;
#[cfg(test)]
#[path = "hazard/oracle.rs"]
mod oracle;
#[cfg(test)]
#[path = "hazard/program.rs"]
mod program;
#[cfg(test)]
#[path = "hazard/random.rs"]
mod random;
#[cfg(test)]
#[path = "hazard/script.rs"]
mod script;
#[cfg(test)]
#[path = "hazard/stories.rs"]
mod stories;
