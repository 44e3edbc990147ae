// Which classes does somebody mean who has typed a few letters? Better matches first, a thousand names at once.

// Accents and case make no difference. Letter by letter, so that places stay those of the name.
const fold = (text) => Array.from(text, (letter) => [...letter.normalize("NFD")][0].toLowerCase()).join("");

export const index = (names) => names.map((name, label) => ({ label, name, folded: fold(name) }));

const isWordStart = (text, place) => place === 0 || !/[\p{L}\p{N}]/u.test(text[place - 1]);

function isWithin(letters, text) {
  let place = 0;
  for (const letter of text) if (letter === letters[place]) place += 1;
  return place === letters.length;
}

// How good a match is, lower is better; null if it is none.
function quality(text, query, words) {
  if (text === query) return 0;
  for (let place = text.indexOf(query); place >= 0; place = text.indexOf(query, place + 1)) {
    if (place === 0) return 1;
    if (isWordStart(text, place)) return 2;
  }
  if (text.includes(query)) return 3;
  if (words.length > 1 && words.every((word) => text.includes(word))) return 4;
  return isWithin(query.replaceAll(" ", ""), text) ? 5 : null;
}

// The classes that match, best first, each with the place of the match in its name (-1 if it is scattered).
export function find(entries, typed) {
  const query = fold(typed.trim()).replace(/\s+/g, " ");
  if (!query) return [];
  const words = query.split(" ");
  const ranked = [];
  for (const entry of entries) {
    const rank = quality(entry.folded, query, words);
    if (rank !== null) ranked.push({ ...entry, rank, place: entry.folded.indexOf(query), length: query.length });
  }
  return ranked.sort((a, b) => a.rank - b.rank || a.name.length - b.name.length || a.label - b.label);
}
