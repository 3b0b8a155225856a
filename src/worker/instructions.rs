//! The texts of the system prompt: inline in the spec, or in mounted files that users edit while the loop runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::engine::Skill;
use crate::link::pod::MAX_SKILL_BYTES;

/// Maximum size of instructions in bytes, inline or mounted.
pub const MAX_BYTES: usize = 32 * 1024;

/// Where instructions and skills come from, and the last valid version of each.
pub struct InstructionSource {
    file: Option<PathBuf>,
    last: String,
    complaint: LoggedProblem,
    /// Names of the skills, in the order of the prompt; each is also a file name in [`Self::dir`].
    names: Vec<String>,
    dir: PathBuf,
    skills: Arc<[Skill]>,
    complaint_of_skills: LoggedProblem,
}

/// The last problem with a text, so that each is logged once.
#[derive(Default)]
struct LoggedProblem(Option<String>);

impl LoggedProblem {
    fn log(&mut self, complaint: String, kept: &str) {
        if self.0.as_ref() != Some(&complaint) {
            tracing::warn!("{complaint}; the loop continues with its previous {kept}");
            self.0 = Some(complaint);
        }
    }
}

impl InstructionSource {
    /// Takes the inline text, or reads the file for the first time.
    pub fn load(inline: Option<String>, file: PathBuf) -> Result<Self, String> {
        let (file, last) = if let Some(text) = inline {
            (None, text)
        } else {
            let text = read(&file)?;
            (Some(file), text)
        };
        Ok(Self {
            file,
            last,
            complaint: LoggedProblem::default(),
            names: Vec::new(),
            dir: PathBuf::new(),
            skills: Arc::default(),
            complaint_of_skills: LoggedProblem::default(),
        })
    }

    /// Adds skills, and reads their files for the first time.
    pub fn with_skills(mut self, names: Vec<String>, dir: PathBuf) -> Result<Self, String> {
        self.skills = read_skills(&names, &dir)?.into();
        self.names = names;
        self.dir = dir;
        Ok(self)
    }

    /// Returns the current text. An unusable file is logged once, and the previous text stays in effect.
    pub fn newest(&mut self) -> &str {
        match self.file.as_ref().map(read).transpose() {
            Ok(text) => {
                self.last = text.unwrap_or_else(|| std::mem::take(&mut self.last));
                self.complaint = LoggedProblem::default();
            }
            Err(complaint) => self.complaint.log(complaint, "instructions"),
        }
        &self.last
    }

    /// Returns the current skills. While one of them is unusable (logged once), all keep their previous text.
    pub fn newest_skills(&mut self) -> Arc<[Skill]> {
        match read_skills(&self.names, &self.dir) {
            Ok(skills) => {
                if *skills != *self.skills {
                    self.skills = skills.into();
                }
                self.complaint_of_skills = LoggedProblem::default();
            }
            Err(complaint) => self.complaint_of_skills.log(complaint, "skills"),
        }
        self.skills.clone()
    }
}

fn read_skills(names: &[String], dir: &Path) -> Result<Vec<Skill>, String> {
    let skill = |name: &String| {
        let file = dir.join(name);
        let text = std::fs::read_to_string(&file).map_err(|error| {
            format!(
                "cannot read the skill in {} ({error}): check spec.skills",
                file.display()
            )
        })?;
        let name = name.clone();
        Ok(Skill { name, text })
    };
    let skills: Vec<Skill> = names.iter().map(skill).collect::<Result<_, String>>()?;
    let all: usize = skills.iter().map(|skill| skill.text.len()).sum();
    if all > MAX_SKILL_BYTES {
        return Err(format!(
            "the skills in {} have {all} bytes in total, more than the maximum of {MAX_SKILL_BYTES}: shorten the texts \
             named in spec.skills",
            dir.display()
        ));
    }
    Ok(skills)
}

fn read(file: &PathBuf) -> Result<String, String> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        format!(
            "cannot read the instructions in {} ({error}): check spec.instructionsFrom",
            file.display()
        )
    })?;
    if text.len() > MAX_BYTES {
        return Err(format!(
            "the instructions in {} have {} bytes, more than the maximum of {MAX_BYTES}: shorten the text named in \
             spec.instructionsFrom",
            file.display(),
            text.len()
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_text_never_reads_the_file() {
        let mut instructions = InstructionSource::load(Some("be".into()), "/nowhere".into()).unwrap();
        assert_eq!(instructions.newest(), "be");
    }

    #[test]
    fn an_edit_is_seen_and_a_file_that_cannot_be_read_leaves_the_last_text() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text");
        std::fs::write(&file, "one").unwrap();
        let mut instructions = InstructionSource::load(None, file.clone()).unwrap();
        std::fs::write(&file, "two").unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::write(&file, "three").unwrap();
        assert_eq!(instructions.newest(), "three");
    }

    fn skills(dir: &Path, names: &[&str]) -> Result<InstructionSource, String> {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        InstructionSource::load(Some("be".into()), "/nowhere".into())?.with_skills(names, dir.to_owned())
    }

    fn texts(instructions: &mut InstructionSource) -> Vec<String> {
        let skills = instructions.newest_skills();
        skills
            .iter()
            .map(|skill| format!("{}: {}", skill.name, skill.text))
            .collect()
    }

    #[test]
    fn skills_keep_their_order_and_an_edit_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b"), "two").unwrap();
        std::fs::write(dir.path().join("a"), "one").unwrap();
        let mut instructions = skills(dir.path(), &["b", "a"]).unwrap();
        assert_eq!(texts(&mut instructions), ["b: two", "a: one"]);
        std::fs::write(dir.path().join("a"), "three").unwrap();
        assert_eq!(texts(&mut instructions), ["b: two", "a: three"]);
        std::fs::remove_file(dir.path().join("b")).unwrap();
        std::fs::write(dir.path().join("a"), "four").unwrap();
        assert_eq!(texts(&mut instructions), ["b: two", "a: three"], "all stay as they are");
        let complaint = skills(dir.path(), &["b"]).err().unwrap();
        assert!(complaint.contains("spec.skills"), "{complaint}");
    }

    #[test]
    fn skills_of_128_kib_together_are_accepted_and_one_byte_more_is_not() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), "x".repeat(MAX_SKILL_BYTES - 1)).unwrap();
        std::fs::write(dir.path().join("b"), "y").unwrap();
        let mut instructions = skills(dir.path(), &["a", "b"]).unwrap();
        std::fs::write(dir.path().join("b"), "yz").unwrap();
        assert_eq!(instructions.newest_skills()[1].text, "y");
        let complaint = skills(dir.path(), &["a", "b"]).err().unwrap();
        assert!(
            complaint.contains("131073 bytes in total, more than the maximum of 131072"),
            "{complaint}"
        );
    }

    #[test]
    fn the_first_text_must_exist_and_the_error_names_what_to_check() {
        let complaint = InstructionSource::load(None, "/nowhere".into()).err().unwrap();
        assert!(complaint.contains("/nowhere") && complaint.contains("spec.instructionsFrom"));
    }

    #[test]
    fn text_of_32_kib_is_accepted_and_one_byte_more_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text");
        std::fs::write(&file, "x".repeat(MAX_BYTES)).unwrap();
        let mut instructions = InstructionSource::load(None, file.clone()).unwrap();
        std::fs::write(&file, "x".repeat(MAX_BYTES + 1)).unwrap();
        assert_eq!(instructions.newest().len(), MAX_BYTES);
    }
}
