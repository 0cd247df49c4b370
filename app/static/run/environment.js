// The source that a run was started with, and what git said had changed: fetched when they are opened.
import { insisted } from 'http'

/** @param {string} line */
const shaded = (line) => {
  const row = document.createElement('span')
  row.textContent = `${line}\n`
  if (/^\+(?!\+\+ )/.test(line)) row.className = 'added'
  if (/^-(?!-- )/.test(line)) row.className = 'removed'
  return row
}

/** @param {Found} box of the section @param {string} api address of the run */
export const createEnvironment = (box, api) => {
  /** @type {Promise<Record<string, string>>|null} */
  let texts = null
  let shown = ''
  box.addEventListener(
    'toggle',
    async ({ target: details }) => {
      if (!details.open) return
      const known = await (texts ??= insisted(`${api}/environment`).then((answer) => answer.json()))
      const name = details.dataset.text
      const text = known[name] || 'No tracked file has changed; there are only untracked files.'
      details.querySelector('pre').replaceChildren(...(name === 'diff' ? text.split('\n').map(shaded) : [text]))
    },
    { capture: true },
  ) // it does not bubble
  return {
    /** Show another attempt's environment; expanded sections stay expanded. @param {string} html */
    show: (html) => {
      if (html === shown) return
      const opened = [...box.querySelectorAll('details[open]')].map(({ dataset }) => dataset.text)
      ;[shown, texts] = [html, null]
      box.innerHTML = html
      for (const name of opened) box.querySelector(`[data-text=${name}]`)?.toggleAttribute('open', true)
    },
  }
}
