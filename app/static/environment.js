// The source that a run was started with, and what git said had changed: fetched when they are opened.
import { insisted } from 'answers'

/** @param {string} line */
const shaded = (line) => {
  const row = document.createElement('span')
  row.textContent = `${line}\n`
  if (/^\+(?!\+\+ )/.test(line)) row.className = 'added'
  if (/^-(?!-- )/.test(line)) row.className = 'removed'
  return row
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createEnvironment = (section, api) => {
  /** @type {Promise<Record<string, string>>|null} */
  let texts = null
  for (const details of section.querySelectorAll('[data-text]')) {
    details.addEventListener('toggle', async () => {
      const known = await (texts ??= insisted(`${api}/environment`).then((answer) => answer.json()))
      const name = details.dataset.text
      const text = known[name] || 'Nothing that git knows: only files that it does not.'
      details.querySelector('pre').replaceChildren(...(name === 'diff' ? text.split('\n').map(shaded) : [text]))
    }, { once: true })
  }
}
