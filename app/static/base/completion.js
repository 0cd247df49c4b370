// What the word at the cursor of the list's filter can become: keys, what they can be, names of
// settings and metrics. Touches no page.

const MOST_SHOWN = 50

/**
 * text: what the word becomes; isWhole: whether nothing more belongs to it.
 * @typedef {{text: string, hint: string, isWhole: boolean}} Proposal
 * keys: by name what each means; values: of a key those that there are; as /api/v1/runs/autocomplete answers.
 * @typedef {{
 *   keys: Record<string, string>,
 *   values: Record<string, string[]>,
 *   numbers: string[],
 *   metrics: string[],
 *   settings: string[]
 * }} Vocabulary
 */

/** @param {string} text as a filter reads it back */
export const quoted = (text) => (/[\s"<>=:]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)
/** @param {string} text typed so far, its quote perhaps still open */
const unquoted = (text) => text.replace(/^"|"$/g, '').replaceAll('""', '"')

/**
 * Return the start and the end of the word at the cursor.
 * @param {string} line
 * @param {number} cursor
 * @returns {[number, number]}
 */
export const wordAt = (line, cursor) => {
  for (const { index, 0: word } of line.matchAll(/(?:"(?:[^"]|"")*(?:"|$)|[^\s"])+/g)) {
    if (index <= cursor && cursor <= index + word.length) return [index, index + word.length]
  }
  return [cursor, cursor]
}

/**
 * Proposals for a part of a line.
 * @param {Vocabulary} words
 * @param {string} typed up to the cursor
 * @returns {Proposal[]}
 */
export const proposals = (words, typed) => {
  const [, sign, rest] = typed.match(/^(-?)(.*)$/s) ?? []
  const keyed = rest.match(/^([a-z]+):(.*)$/s)
  if (keyed && keyed[1] in words.keys) {
    const values = words.values[keyed[1]] ?? []
    return found(values, unquoted(keyed[2])).map((value) => ({
      text: `${sign}${keyed[1]}:${quoted(value)}`,
      hint: '',
      isWhole: true,
    }))
  }
  if (/[<>=:]/.test(rest.replace(/^"(?:[^"]|"")*(?:"|$)/, ''))) return []
  /** Hint of each name; the first of two counts. @type {Map<string, string>} */
  const hints = new Map()
  const add = (name, hint) => {
    if (!hints.has(name)) hints.set(name, hint)
  }
  for (const [key, hint] of Object.entries(words.keys)) add(`${key}:`, hint)
  for (const name of words.numbers) add(name, 'number')
  for (const name of words.metrics) add(name, 'metric')
  for (const name of words.settings) add(name, 'setting')
  return found([...hints.keys()], unquoted(rest)).map((name) => ({
    text: sign + (name.slice(0, -1) in words.keys ? name : quoted(name)),
    hint: hints.get(name) ?? '',
    isWhole: false,
  }))
}

/** Keys whose values are all known: any other is refused. */
const CLOSED = ['status', 'source']

/**
 * Return whether a part of a line is not yet a word, which Enter should complete.
 * @param {Vocabulary} words
 * @param {string} typed up to the cursor
 */
export const isUnfinished = (words, typed) => {
  const [, key, value] = typed.match(/^-?([a-z]+):(.*)$/s) ?? []
  if (!key || !(key in words.keys)) return false
  return !value || (CLOSED.includes(key) && !(words.values[key] ?? []).includes(unquoted(value)))
}

/** First letters of the words of a name: lr of learning_rate. @param {string} name */
const initials = (name) =>
  name
    .split(/[_/.]/)
    .map((word) => word.charAt(0))
    .join('')

/**
 * Return the values that begin with a text, then those that contain it elsewhere, then those of these initials.
 * @param {string[]} values
 * @param {string} text
 */
const found = (values, text) => {
  const [wanted, has] = [text.toLowerCase(), (value) => value.toLowerCase()]
  const first = values.filter((value) => has(value).startsWith(wanted))
  const later = values.filter((value) => has(value).includes(wanted, 1) && !has(value).startsWith(wanted))
  const short = values.filter((value) => wanted && initials(has(value)) === wanted && !has(value).includes(wanted))
  return [...first, ...later, ...short].slice(0, MOST_SHOWN)
}
