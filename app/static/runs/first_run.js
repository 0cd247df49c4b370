// The list without a run: a token for one's own script, without leaving the page.
import { toast } from 'page'
import { root } from 'root'

document.querySelector('[data-create-token]')?.addEventListener('submit', async (event) => {
  event.preventDefault()
  const form = event.target
  const button = form.querySelector('button')
  button.disabled = true
  try {
    const answer = await fetch(`${root}/api/v1/tokens`, {
      method: 'POST',
      headers: { 'X-CSRF-Token': form.elements.csrf_token.value, 'Content-Type': 'application/json' },
      body: JSON.stringify({ name: form.elements.name.value, kind: form.elements.kind.value }),
    })
    const made = await answer.json()
    if (!answer.ok) throw new Error(made.detail)
    document.querySelector('[data-token]').textContent = made.token
    document.querySelector('[data-new-token]').hidden = false
    const copy = document.querySelector('[data-copy-token]')
    copy.dataset.copyText = made.token
    copy.hidden = false
    form.hidden = true
    copy.focus()
  } catch (error) {
    toast(
      error instanceof Error && !(error instanceof TypeError)
        ? error.message
        : 'The server does not answer. No token was created.',
    )
  } finally {
    button.disabled = false
  }
})
