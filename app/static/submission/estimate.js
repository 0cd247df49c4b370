// Estimated cost of a run next to the submit button, requested again as the form changes.

import { root } from 'root'

const PAUSE_MS = 400
const LONGEST = 200 // of a setting: it goes into a URL
const form = /** @type {Found} */ (globalThis.document?.querySelector('[data-run-form]'))
const output = form?.querySelector('[data-cost]')

/** What is asked for, by the names of the form's inputs. @type {Record<string, string>} */
const ASKED = {
  recipe: 'recipe',
  precision: 'precision',
  batch_size: 'training.batch_size',
  nodes: 'nodes',
  devices_per_node: 'devices_per_node',
  priority: 'priority',
}

const NUMBERS = ['training.steps', 'training.batch_size', 'nodes', 'devices_per_node', 'priority']

/** @param {FormData} typed */
export const question = (typed) => {
  /** @param {string} name */
  const number = (name) => Number(typed.get(name) || 0)
  const query = new URLSearchParams()
  for (const [name, input] of Object.entries(ASKED)) if (typed.get(input)) query.set(name, String(typed.get(input)))
  // The steps of epochs are unknown before the data are read.
  if (!typed.get('training.epochs'))
    query.set('steps', String(Math.max(number('training.steps') - number('parent_step'), 0)))
  if (number('checkpoints.every_steps') && !typed.get('checkpoints.keep_last'))
    query.set('every_steps', String(number('checkpoints.every_steps')))
  for (const [name, value] of typed.entries())
    if (name.startsWith('recipe.') && String(value).length < LONGEST) query.append('size', `${name}=${value}`)
  return query.toString()
}

/**
 * Show on the cards of precisions what runs of these sizes have measured.
 * @param {Record<string, {speed_text: string, memory_text: string}>} measured
 */
const showMeasured = (measured) => {
  for (const [field, text] of [
    ['speed', 'speed_text'],
    ['memory', 'memory_text'],
  ]) {
    for (const cell of form.querySelectorAll(`[data-${field}]`))
      cell.textContent = measured[cell.dataset[field]]?.[text] || 'not measured yet'
  }
}

let timer = 0
let asked = ''

const ask = async () => {
  const data = new FormData(/** @type {any} */ (form))
  if (NUMBERS.some((name) => Number.isNaN(Number(data.get(name))))) return // the server refuses the form
  const query = question(data)
  const measures = !['train', null].includes(/** @type {string|null} */ (data.get('lab.task')))
  const key = `${query} ${measures}`
  if (key === asked) return
  asked = key
  /** @type {string[]} */
  let words = []
  /** @type {Record<string, any>} */
  let measured = {}
  try {
    const answer = await fetch(`${root}/api/v1/estimates?${query}`)
    if (answer.ok) ({ sentences: words, measured } = await answer.json())
  } catch {
    asked = '' // the server is away: at the next change
  }
  if (key !== asked && asked) return
  if (measures) words = ['It measures precisions and does not train: its time is unknown']
  showMeasured(measured)
  output.replaceChildren(...words.map((line) => Object.assign(document.createElement('p'), { textContent: line })))
}

if (output) {
  form.addEventListener('input', () => {
    clearTimeout(timer)
    timer = setTimeout(ask, PAUSE_MS)
  })
  ask()
}
